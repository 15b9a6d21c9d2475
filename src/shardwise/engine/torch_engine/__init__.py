"""The same plan on torch's own engines: the oracle in tests, the peer in benchmarks, and `engine = "torch"`.

plain_model.py    the state that a rank holds of any torch module, also of one without an engine
refuse.py         the models and plans that torch's engines cannot run, one line each (plan/limits.py)
full_state.py     state dicts, clipping and norms of gradients
torch_engine.py   the methods of our engine (engine/our_engine.py)
prepare.py        a plan → DistributedDataParallel, or fully_shard unit by unit
"""
