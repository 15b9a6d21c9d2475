"""Training on one rank: `shardwise train CONFIG.toml` and `shardwise.step`, and the launcher that starts the ranks.

config/         CONFIG.toml, as one frozen value
rank_run.py     `train`: join the job, claim the run folder (run_folder.py), set up (setup.py), resume, run the loop
loading/        the samples of each rank
loop/           the steps of a run: training_step.py is one, `shardwise.step`; loop.py runs them
fitting/        a plan that fits: `plan.strategy = "auto"`, a rehearsal of its step, and what follows on out-of-memory
launch/         starts the ranks on this machine, and watches over them
"""
