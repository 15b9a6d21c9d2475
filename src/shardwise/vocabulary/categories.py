"""What the bytes on a device are for: the categories by which memory is predicted, measured and drawn.

    params        parameters that a rank owns, in the dtype that computes or as fp32 master, outside of optim
    gathered      temporary full copies of sharded parameters
    grads         reduced gradients, which the optimizer reads
    reduce        buffers that are being reduced, and gradients that autograd made and nobody has taken yet
    optim         fp32 master weights where they are separate from the parameters, and moments
    activations   what forward keeps for backward, and what both make on the way
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
"""No category of a device: what a plan offloads to host memory."""
