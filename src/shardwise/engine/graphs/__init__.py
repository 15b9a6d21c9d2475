"""What whole steps as CUDA graphs (captured/) and units as CUDA graphs (unit_graphs/) share.

reads.py          values that Python reads from the device: noted in ordinary steps, guarded in replays
python_state.py   Python state that a step depends on or changes: attributes, closures, generators, buffers
torch_modes.py    torch's global switches, which may change the kernels
step_device.py    the device, its stream and its memory
step_pool.py      a pool of the device's memory
graph_fills.py    the small memsets of a graph as kernels
compile_clock.py  counts and times the compilations of torch.compile
"""
