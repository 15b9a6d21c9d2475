"""Measures the memory of a step, storage by storage, on one rank of a job of any size.

cpu_allocations.py    reads when each tensor was allocated and freed; cuda_allocations.py: on a GPU
step_rows.py          marks the rows of the step program, with what the engine holds at each
memory_ledger.py      combines both into the ledger: live bytes by category, row by row
recording.py          records one step, and makes its ledger
traceless.py          collectives that do not show up in a recording on a CPU
step_peak.py          measures the peak of a block of code
rehearsal.py          measures one rank of N in a separate process (rehearsal_process.py)
compare.py            compares predicted and measured memory, for several strategies
"""
