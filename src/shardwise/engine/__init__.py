"""Step 5 of 5: the engine runs a plan. `prepare` changes a model and an optimizer so that an ordinary loop trains.

The core trains a model under every strategy and knows nothing else. Everything around it listens to its events, adds
operations to its program, or uses its methods (core/core.py); take it away, and the core computes the same
(tests/dist/test_core_alone.py). From the bottom up:

hooks/           a forward and a backward become triggers at units; the trace and the profile listen to them, too
core/            units (full buffers, masters, gradients), buckets, the executor, the tape, an optimizer's slices
guards/          misuse, foreign writes, ranks that do different things or hold different bits, ranks with equal batches
optimizer/       can an optimizer step slices (reach.py); matrices that one rank owns, states, the fp16 scaler
activations/     recompute, offload and torch.compile of units; offload/: copies to and from host memory
carry.py         a prepared model carries its engine
engine.py        the core of a model, and the parts that are attached to it
prepared/        functions for a prepared model: state dicts, clipping, accumulation, full parameters, averages
plan_change/     another plan between two steps, and models that were changed
out_of_memory.py the explanation of an out-of-memory error: what was held, and where the step was
our_engine.py    the engine: its parts and its methods
prepare.py       puts it together
"""
