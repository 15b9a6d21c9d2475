"""Step 5 of 5: the engine runs a plan. `prepare` changes a model and an optimizer so that an ordinary loop trains.

From the bottom up; each imports only what stands above it here.

tape.py         the operations that a run issued; pass_state.py: how a pass counts; step_errors.py: what is wrong with a
                step; transfer.py: copies to the host
params/         flat buffers (flat_buffers.py) and their gradients (flat.py), guards against reading what is freed, what
                users write (written.py), what a quantised weight carries, casts;
                unit.py: a unit at work
grads/          the buffers that gradients are reduced in (segment.py, bucket.py), and which parameters were used
activations/    recompute, offload and torch.compile of units
optimizer/      what a rank's optimizer steps: slices, if it can (reach.py tries it), or whole matrices that it owns
                (matrices.py); the fp16 scaler
step/           runner.py listens to the model's hooks and moves the program's cursor, executor.py does the rows on
                tensors, learn.py finds the order of units in the first step, first_inputs.py ranks with equal batches,
                evaluation_gathers.py what forwards without gradients gather
engine.py       what the model carries
prepared/       what is asked of a prepared model: state dicts, clipping, accumulation, what it holds, whole parameters,
                an average of them
captured/       steps as CUDA graphs
assembly.py     the parts of an engine for one plan
prepare.py      puts it together; description.py: what ranks must have been given alike; refuse.py: models that it
                does not take; extend.py: a prepared model that was changed
replan.py       another plan between two steps; reshard.py: what moves then, a buffer at a time
"""
