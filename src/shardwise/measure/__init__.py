"""What a step really takes: its memory, storage by storage, and its time; of one rank of a job of any size.

live.py        the allocator's own events → every allocation's birth and death; history.py: the same on a GPU
rows.py        marks where the step program has its rows, with what the engine holds at each
memory.py      both together → the ledger: live bytes by category, row by row
rehearsal.py   one rank of N, measured in a process of its own
rank.py        that process
recording.py   one recorded step: its rows, and from them the ledger
profile.py     what was predicted beside what was measured, for several strategies

benchmark.py        the same training under several engines and strategies, in turn
case.py             one of them: all that its runs found, in one
equivalence.py      whether all did the same training
recommendation.py   which one to use; byte_unit.py: how sizes are shown
prediction.py       what the planner says of each
results.py          all of this as values and as JSON
contestants.py      the engines, and which of them can run a case; peers.py: those of others
bench_run.py        what the ranks of a run are told, and what each found
bench_rank.py       a rank: subject.py (the training), first_steps.py (what is compared), then timed, then recorded
observer.py         dtypes and collectives, seen from under any engine; gradients.py: norms, by parameter
"""
