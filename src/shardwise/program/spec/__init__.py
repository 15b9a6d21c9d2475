"""Step 2 of 5: everything the planner knows about a model, without the model and without torch.

`units/` makes a spec from any `nn.Module`; the step program, the planner and the reports read it.
"""

from shardwise.program.spec.model import (
    ANNOUNCED,
    NONE,
    ROOT,
    UNANNOUNCED,
    ModelSpec,
    TensorSpec,
    UnitSpec,
    most_demanding,
)

__all__ = ["ANNOUNCED", "NONE", "ROOT", "UNANNOUNCED", "ModelSpec", "TensorSpec", "UnitSpec", "most_demanding"]
