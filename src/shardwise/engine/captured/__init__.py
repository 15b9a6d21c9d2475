"""A training step as CUDA graphs.

reads.py          the values that a model looks at: noted in ordinary steps, assumed and compared in captured ones
python_state.py   what a step's Python depends on or changes: attributes, closures, generators, buffers
probed_step.py    an ordinary step that is looked at
step_device.py    the device, its stream and its memory
step_pool.py      a pool of the device's memory
step_memory.py    who shares it: graphs, ordinary steps and evaluations; and what replays would overwrite
shared_evaluation.py   evaluations in that memory
step_key.py       what has to be the same for a graph to be replayed
graph_store.py    the graphs that there are, how they fared, and which goes when there are too many
step_graphs.py    two graphs of a step: its passes, and its update; abandon.py: a recording that failed
replayed_grads.py replayed gradients compared with those of an ordinary step
captured_step.py  calls of a step: ordinary ones, then replays; all ranks do the same
capture.py        which steps are captured at all
"""
