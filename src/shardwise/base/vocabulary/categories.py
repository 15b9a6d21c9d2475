"""Categories of memory, by which bytes on a device are predicted, measured and drawn.

    params        parameters that a rank owns, in the dtype that computes or as fp32 master, outside of optim
    gathered      temporary full copies of sharded parameters
    grads         reduced gradients, which the optimizer reads
    reduce        buffers that are being reduced, and gradients of autograd that are not yet copied into one
    optim         fp32 master weights where they are separate from the parameters, and moments
    activations   tensors that forward keeps for backward, and temporaries of both
    other         optimizer temporaries, workspaces, padding, the model's own buffers

Every predicted or measured breakdown has all of them, in this order.
"""

from typing import Final

PARAMS: Final = "params"
GATHERED: Final = "gathered"
GRADS: Final = "grads"
REDUCE: Final = "reduce"
OPTIM: Final = "optim"
ACTIVATIONS: Final = "activations"
OTHER: Final = "other"

CATEGORIES: Final = (PARAMS, GATHERED, GRADS, REDUCE, OPTIM, ACTIVATIONS, OTHER)

HOST: Final = "host"
"""Host memory that a plan offloads to; not a category of a device."""
