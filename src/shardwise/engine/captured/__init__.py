"""A training step as CUDA graphs. What it shares with units as graphs is in ../graphs.

probed_step.py    an ordinary step, observed
step_memory.py    shares the pool between graphs, ordinary steps and evaluations
shared_evaluation.py   evaluations in that memory
step_key.py       the key of a step: it must be equal for a graph to be replayed
graph_store.py    all graphs by key, with their statistics; evicts the least recently used one
step_graphs.py    two graphs of a step: its passes, and its update
replayed_grads.py replayed gradients compared with those of an ordinary step
captured_step.py  calls of a step: ordinary ones, then replays; all ranks do the same
capture.py        `capture`: decides whether the steps of a plan are captured
"""
