"""Explains each operation of a step in one sentence, for readers who learn how sharding works."""

from collections.abc import Mapping

from shardwise.plan.placement import Mesh, Placement
from shardwise.program import Kind

SIZE = "{size}"
"""A placeholder that the script replaces: the bytes that a rank sends in a gather, or all bytes that are reduced."""
_SLICES: Mapping[int, str] = {1: "slice, which is all of it", 2: "half", 3: "third", 4: "quarter"}


def beginning(*, keeps_grads: bool) -> str:
    """Describe the state before the first operation; `keeps_grads`: gradients have memory between steps."""
    if keeps_grads:
        return "The gradients of the previous step are out of date; their buffer stays allocated, and is filled again."
    return "The gradients of the previous step are gone; this is what every rank has."


def caption(kind: Kind, *, placement: Placement, trained: bool, mesh: Mesh) -> str:
    """Describe an operation on a unit or bucket of this placement; `trained`: it has trainable parameters."""
    share = _SLICES.get(mesh.shard, f"1/{mesh.shard}")
    match kind:
        case Kind.GATHER:
            part = f"its {share}" if placement.params.is_sharded else f"the {share} that it has updated"
            return f"Every rank sends {part}, {SIZE}, and collects the others’."
        case Kind.WAIT_GATHER:
            return "All slices have arrived: every rank holds all of it."
        case Kind.FORWARD:
            return "Every rank computes it on its own samples, and keeps the activations for backward."
        case Kind.FREE:
            return f"The copy is dropped: every rank keeps its own {share}."
        case Kind.BACKWARD if trained:
            return "Every rank computes gradients from its own samples: they differ from rank to rank."
        case Kind.BACKWARD:
            return "Every rank passes on the gradient of its own samples; nothing is trained here."
        case Kind.TAKE_GRADS:
            return "Its gradients are copied into the buffer in which they will be added up."
        case Kind.REDUCE:
            return _reduce(placement, mesh=mesh, share=share)
        case Kind.WAIT_REDUCE if placement.grads.is_sharded and mesh.replicate > 1:
            return f"Every rank has the sum of its {share} over its own group of ranks; the other groups have theirs."
        case Kind.WAIT_REDUCE:
            held = "all of it" if not placement.grads.is_sharded or mesh.shard == 1 else f"its {share} of it"
            return f"The sum of the gradients is there: every rank holds {held}."
        case Kind.REDUCE_SLICE if placement.grads.is_sharded_across:
            return f"Reduce-scatter of {SIZE} over the {mesh.replicate} groups: every rank gets a part of its {share}."
        case Kind.REDUCE_SLICE:
            return f"All-reduce of {SIZE} over the {mesh.replicate} groups: every rank gets the sum of its {share}."
        case Kind.WAIT_SLICE:
            return f"The sum over all groups of ranks is there: every rank holds that of its {share}."
        case Kind.GATHER_SLICE:
            return f"Every rank sends the part of its {share} that it has updated, {SIZE}, to the other groups."
        case Kind.WAIT_GATHER_SLICE:
            return f"The parts that other groups have updated are there: every rank's {share} is up to date."
        case Kind.REDUCE_FLAGS:
            return "The ranks exchange which parameters they used; one that no rank used is not updated."
        case Kind.BROADCAST:
            return "Rank 0 sends its buffers (such as running means), so that all ranks compute with the same ones."
        case Kind.GATHER_SCALES:
            return (
                "The ranks agree on the scale of each weight that is gathered in fp8, from the maxima of their slices."
            )
        case Kind.TO_OWNERS:
            return f"Each matrix that must be updated as a whole goes to the rank that owns it: {SIZE} with gradients."
        case Kind.FROM_OWNERS:
            return f"Their new values go back, {SIZE}: every rank gets its {share} of each."
        case Kind.UPDATE if placement.optim.is_sharded_across:
            return f"Every rank updates its part of the {share}, one for each of the {mesh.replicate} groups."
        case Kind.UPDATE if placement.optim.is_sharded:
            return f"Every rank updates the {share} that it owns."
        case Kind.UPDATE:
            return "Every rank makes the same update of everything, so nothing has to be sent."


def _reduce(placement: Placement, *, mesh: Mesh, share: str) -> str:
    if not placement.grads.is_sharded:
        return f"All-reduce of {SIZE}: gradients are added up, and every rank gets the whole sum."
    where = " in each group of ranks" if mesh.replicate > 1 else ""
    return f"Reduce-scatter of {SIZE}: gradients are added up{where}, and every rank gets the sum of its {share}."
