"""The groups of a mesh, and the collectives that run on them.

groups.py            makes the groups; issued.py: logs the collectives that each group was given
rank_progress.py     holds how far this process has come
collectives.py       the backend's collectives; ring.py: our own
small_collectives.py small values over many ranks; step_flags.py: once per step, without waiting
agreement.py         exchanges values between ranks and compares them
dtensor.py           handles torch's DTensors without importing them
"""
