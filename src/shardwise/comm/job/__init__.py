"""A process joins its job, and leaves it.

job_environment.py      reads rank, job and rendezvous from the environment variables
rendezvous.py           makes the store, and waits until every rank has joined
join.py                 chooses the rank's device and makes the default process group
allocator_settings.py   the settings of torch's allocator with which ranks start
leave.py                releases CUDA graphs before process groups are destroyed
absent.py               one rank of a job without the others
"""
