"""The steps of a training on one rank, with metrics, evaluations and checkpoints in between.

training_step.py             one optimizer step: forward and backward of each pass, clipping, update
update.py                    the same in a training: its batches (batches.py) and its state (training_state.py)
loop.py                      `Training`; steps, metrics, evaluations, checkpoints
randomness.py, optimizers.py random numbers that are the same after a restart; [optimizer] of the config
evaluation.py                sums over the evaluation samples
metrics.py, progress.py      metrics.jsonl, TensorBoard, console; compile_clock.py: what torch.compile took
restored.py                  passes that leave no trace
nonfinite.py                 NaN and Inf: stop, skip or warn, and the module that they come from
preemption.py                SIGTERM: all ranks save and stop at the same step
"""
