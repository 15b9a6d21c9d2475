"""Runs the same training under several engines and strategies, in turn, and recommends one of them.

benchmark.py        runs all cases
case.py             collects the runs of one case into a CaseResult (case_result.py)
equivalence.py      checks that all cases did the same training
recommendation.py   chooses a case, from the spread of its times (spread.py) and its moving parts
prediction.py       asks the planner for the same cases
results.py          the results as values and as JSON; results_form.py: reads and checks that JSON
contestants.py      the engines, and which of them can run a case; modes.py: eager, captured or compiled
run_files.py        the request and the result files of one run
worker.py           one rank of a run, in this order: subject.py sets up the training, first_steps.py takes the steps
                    that are compared, others are timed, taped_steps.py tapes and records the last ones
observer.py         observes dtypes and collectives beneath any engine; gradients.py: norms per parameter
graph_update.py     captures the step of another engine in a CUDA graph
peers.py            Accelerate and Lightning; deepspeed_peer.py, megatron_peer.py; peer_setup.py: what they share
"""
