"""Communication: the groups of a mesh, and the collectives that run on them.

torch.distributed carries the bytes (NCCL on GPUs, Gloo on CPUs); nothing here knows of units or plans.
"""
