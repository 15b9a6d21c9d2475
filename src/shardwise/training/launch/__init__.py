"""Starts the ranks of a job on this machine and watches over them.

launch.py           runs a job, and reports how it ended
agent.py            starts the ranks, watches them and starts them again: torch's elastic agent for one machine
rank_process.py     the entry point of each rank
stop_signals.py     the signals after which a job saves and ends
failure.py          reports why a rank failed; the launcher shows the first failure
private_folder.py   the folder in which a launcher and its ranks exchange files
folder_lock.py      allows one job at a time in a run folder
"""
