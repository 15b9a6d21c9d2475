"""Where averaged gradients lie while units are CUDA graphs. The engine and the planner decide by the same rule."""


def places_gradients(activations: int, *, loss: int, gradients: int) -> bool:
    """Return whether gradients take the place of activations, in the memory of graphs.

    Graphs keep theirs from step to step, so that what they do not share comes on top. Where units keep less than the
    loss does, gradients rather take the place of what that has left in ordinary memory.

    activations   bytes that units keep for backward; `loss`: what else there is when backward begins, such as logits
    """
    return activations >= min(loss, gradients)
