"""The same plan on torch's own engines: the oracle in tests, the peer in benchmarks, and `engine = "torch"`.

prepare.py      a plan → DistributedDataParallel, or fully_shard unit by unit
refuse.py       models and plans that torch's engines cannot run, one line each (engine_limits.py)
accumulate.py   accumulation and uneven counts
full_state.py   the gradients' norm and full state dicts of a model that was prepared so
"""
