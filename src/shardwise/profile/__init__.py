"""The memory that a step really takes, storage by storage, on one rank of a job of any size.

cpu_allocations.py    the allocator's own events → every allocation's birth and death; cuda_allocations.py: on a GPU
rows.py               marks where the step program has its rows, with what the engine holds at each
memory_ledger.py      both together → the ledger: live bytes by category, row by row
recording.py          one recorded step: its rows, and from them the ledger
step_peak.py          the most that a rank holds at once in a block of code
rehearsal.py          one rank of N, measured in a process of its own (rehearsal_process.py)
compare.py            predicted and measured, for several strategies
"""
