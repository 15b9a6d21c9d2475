"""The same plan on torch's own engines: the oracle in tests, the peer in benchmarks, and `engine = "torch"`.

prepare.py   a plan → DistributedDataParallel, or fully_shard unit by unit
refuse.py    what a plan may ask for that torch's engines do not have, a line each
state.py     the gradients' norm and full state dicts of a model that was prepared so
"""
