"""Errors of a step, one line each."""

from shardwise.base.errors import InvalidData, InvalidModel


def backward_without_forward() -> InvalidModel:
    """The error for gradients of a step in which the model itself was not called."""
    return InvalidModel(
        "a backward without a forward of the model since the last step: what another method computes "
        "(model.training_step(x)), or torch.func.vmap(model), is not synchronised; call the model itself, model(x), "
        "or say shardwise.forward_method(model, 'training_step') after shardwise.prepare"
    )


def forward_called_directly(unit: str) -> InvalidModel:
    """The error for a unit whose forward runs, and whose module was not called: no hook has gathered it."""
    return InvalidModel(
        f"{unit}.forward is called directly, which calls no hooks, so that its parameters are not gathered: call the "
        f"module itself, {unit}(…) in place of {unit}.forward(…), or use zero2"
    )


def called_in_transform(name: str) -> InvalidModel:
    """The error for a sharded parameter that torch.func reads: what it transforms gathers nothing."""
    return InvalidModel(
        f"{name} is sharded, and a function that torch.func transforms (vmap, grad, …) reads it: hand the values of "
        "shardwise.full_state_dict(model)['model'] to torch.func.functional_call, or use zero2"
    )


def added_to_average(name: str) -> InvalidModel:
    """The error for this rank's own gradient that autograd has added to the average over all ranks."""
    return InvalidModel(
        f"{name} got a gradient that does not come through the model's outputs (a penalty on the weights), on top of "
        "gradients that are averaged already: add it to the loss, or run its backward before the loss's"
    )


def frozen_has_gradient(name: str) -> InvalidModel:
    """The error for an update of slices that no rank gathers, since all that lies in their buffer is frozen."""
    return InvalidModel(
        f"{name} is frozen and still has a gradient, by which optimizer.step() would change it: call zero_grad() "
        "before parameters are frozen"
    )


def frozen_was_written(name: str) -> InvalidModel:
    """The error for a write to such slices."""
    return InvalidModel(
        f"slices of {name} or a neighbour, which is frozen, were written to: write inside `with shardwise.edit(model):`"
    )


def thawed_in_forward(name: str) -> InvalidModel:
    """The error for a gradient of a parameter that was frozen when this step began."""
    return InvalidModel(
        f"{name} was frozen when the model was called, and has a gradient: call requires_grad_(True) before the "
        "forward, on every rank, not inside it"
    )


def thawed_without_master(name: str, *, dtype: object) -> InvalidModel:
    """The error for training a parameter that an optimizer would have to step in half precision."""
    return InvalidModel(
        f"{name} is trained now and has no fp32 master: it was frozen, in {dtype}, when the model was prepared. Call "
        "shardwise.extend(model) after requires_grad_(True), on every rank, and it gets one"
    )


def backward_raised() -> InvalidData:
    """The error for an update by the gradients of a backward that raised. They differ between ranks."""
    return InvalidData(
        "a step right after a backward that raised, whose gradients are not whole: call optimizer.zero_grad() and "
        "begin the step again"
    )


def step_inside_backward() -> InvalidModel:
    """The error for an optimizer that a hook of a parameter steps."""
    return InvalidModel(
        "optimizer.step() inside a backward (in a hook of a parameter), before the ranks have averaged its gradients: "
        "step after backward; to hold fewer gradients and states use zero2 or fsdp"
    )


def accumulation_failed() -> InvalidData:
    """The error for a forward after a backward that raised, where earlier passes have left gradients."""
    return InvalidData(
        "a backward failed in the middle of an accumulation, so the gradients so far are not whole: call "
        "optimizer.zero_grad() and begin the step again"
    )


def not_reduced_yet() -> InvalidModel:
    """The error for an update in the middle of an accumulation."""
    return InvalidModel(
        "the gradients of an accumulation are not reduced yet: run its last backward outside shardwise.accumulate"
    )


def reentrant_recompute(unit: str) -> InvalidModel:
    """The error for a unit whose forward ran without gradients, and runs again in backward."""
    return InvalidModel(
        f"{unit} is recomputed by a reentrant checkpoint: say use_reentrant=False in torch.utils.checkpoint"
    )


def gradients_of_gradients(unit: str) -> InvalidModel:
    """The error for create_graph=True where parameters are freed before the second backward."""
    return InvalidModel(
        f"gradients of gradients (create_graph=True) need parameters that stay until the second backward, and those of "
        f"{unit} are sharded: use zero2, zero1 or ddp"
    )


def graph_in_grads() -> InvalidModel:
    """The error for a differentiable `p.grad`: the average over all ranks is not differentiable."""
    return InvalidModel(
        "backward(create_graph=True): p.grad is averaged over the ranks, and gradients of gradients do not pass "
        "through an average: use torch.autograd.grad(loss, inputs, create_graph=True), which returns this rank's own"
    )


def updated_in_backward(what: str) -> InvalidModel:
    return InvalidModel(f"{what} with update = 'backward': the gradients have been used and freed; set update = 'step'")
