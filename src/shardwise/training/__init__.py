"""Training on one rank: `shardwise train CONFIG.toml` and `shardwise.step`. Ranks are started by launch/.

config.py, config_section.py, config_sections.py      CONFIG.toml
rank_run.py                       `train`: join the job, claim the run folder, set up, resume, run the loop
setup.py, optimizers.py           task, model with its plan, optimizer, data
loop.py                           `Training`; steps, metrics, evaluations, checkpoints
training_step.py                  one optimizer step; `shardwise.step`
batches.py, randomness.py         samples and random numbers, the same after a restart
learning_rate.py, evaluation.py   the schedule; evaluation samples
metrics.py, progress.py           metrics.jsonl, TensorBoard, console
restored.py                       passes that leave no trace
nonfinite.py                      NaN and Inf: stop, skip or warn, and the module that they come from
preemption.py, run_folder.py      SIGTERM; the files of a run
auto_plan.py, automatic.py        `plan.strategy = "auto"`: rank 0 solves a plan
memory_probe.py                   a rehearsal of a step of that plan
ran_out.py                        a start that runs out of memory: the next one takes a smaller plan
memory_advice.py                  the planner's lines on an out-of-memory error
"""
