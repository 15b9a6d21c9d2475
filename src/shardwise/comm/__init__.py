"""Communication: joining a job, the process groups of a mesh, the collectives that run on them, and the watchdog.

groups/    the groups of a mesh, and collectives: the backend's, and our own ring as the example
job/       a process joins its job and leaves it, or rehearses one rank of a job without the others
watch/     the watchdog, and the record that a rank leaves when its job fails
autopsy/   reads these records

torch.distributed carries the bytes (NCCL on GPUs, Gloo on CPUs). Nothing here depends on an engine.
"""
