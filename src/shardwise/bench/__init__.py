"""The same training under several engines and strategies, in turn, and which of them to use.

benchmark.py        the whole bench
case.py             one case: what all of its runs found
equivalence.py      verifies that all cases did the same training
recommendation.py   which case to use
prediction.py       what the planner predicts for each
results.py          all of this as values and as JSON
contestants.py      the engines, and which of them can run a case; peers.py: those of other libraries
run_files.py        what the ranks of a run are told, and what each found
worker.py           one rank: subject.py (the training), first_steps.py (what is compared), then timed, then recorded
observer.py         dtypes and collectives, seen from below any engine; gradients.py: norms, by parameter
"""
