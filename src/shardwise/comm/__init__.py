"""Communication: joining a job, the process groups of a mesh, the collectives that run on them, and the watchdog.

allocator_settings.py   the settings of torch's allocator with which ranks start
job_environment.py   reads rank, job and rendezvous from the environment variables
rendezvous.py        makes the store, and waits until every rank has joined
join.py              chooses the rank's device and makes the default process group
leave.py             releases CUDA graphs before process groups are destroyed
agreement.py         exchanges values between ranks and compares them
groups.py            makes the groups of a mesh; issued.py: logs the collectives that each group was given
collectives.py       the backend's collectives; ring.py: our own; absent.py: one rank of a job without the others
dtensor.py           handles torch's DTensors without importing them
rank_progress.py     holds how far this process has come; watch.py: the watchdog (pace.py, noticeboard.py, stall.py)
record_writer.py     writes the record that `shardwise autopsy` reads

torch.distributed carries the bytes (NCCL on GPUs, Gloo on CPUs). Nothing here depends on an engine.
"""
