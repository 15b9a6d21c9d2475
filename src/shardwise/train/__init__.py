"""Training on one rank: `shardwise train CONFIG.toml` and `shardwise.step`. Ranks are started by launch/.

config.py, config_section.py      CONFIG.toml
rank_run.py                       `train`: join the job, claim the run folder, set up, resume, run the loop
setup.py, optimizers.py           task, model with its plan, optimizer, data
loop.py                           steps, metrics, evaluations, checkpoints
training_step.py                  one optimizer step; `shardwise.step`
batches.py, randomness.py         samples and random numbers, the same after a restart
learning_rate.py, evaluation.py   the schedule; metrics on evaluation samples
metrics.py, progress.py           metrics.jsonl, TensorBoard, console
nonfinite.py, first_nonfinite.py  NaN and Inf: what follows, and the module that they come from
preemption.py, run_folder.py      SIGTERM; the files of a run

auto_plan.py, automatic.py        `plan.strategy = "auto"`: solve a plan on rank 0
memory_probe.py, memory_budget.py rehearse a step of that plan; limit the process to the budget
memory_retry.py                   run a step again under a smaller plan (smaller_plan_search.py)
memory_advice.py                  what an out-of-memory error says (fitting_plan.py)
"""
