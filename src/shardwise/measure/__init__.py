"""What a step really takes: its memory, storage by storage, and its time; of one rank of a job of any size.

live.py        the allocator's own events → every allocation's birth and death
rows.py        marks where the step program has its rows, with what the engine holds at each
memory.py      both together → the ledger: live bytes by category, row by row
rehearsal.py   one rank of N, measured in a process of its own
rank.py        that process
profile.py     what was predicted beside what was measured, for several strategies
"""
