"""Communication: how a process joins its job, the groups of a mesh, and the collectives that run on them.

job_environment.py   what the environment says of this process: rank, job, where the ranks meet
rendezvous.py        the store, and the wait until every rank is there
join.py              the rank's device and the default process group
agreement.py         what ranks tell each other before they continue
groups.py            the groups of a mesh; issued.py: what each was given to do
collectives.py       the collectives of the backend; ring.py: our own; absent.py: with the other ranks absent
rank_progress.py     how far this process has come; watch.py: the watchdog (pace.py, noticeboard.py, stall.py)

torch.distributed carries the bytes (NCCL on GPUs, Gloo on CPUs); nothing here knows of units or plans.
"""
