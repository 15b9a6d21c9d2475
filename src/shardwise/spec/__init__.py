"""Step 2 of 5: all that is known of a model, without the model and without torch.

`units.py` makes a spec from any `nn.Module`; the step program, the planner and the reports read it.
"""

from shardwise.spec.model import ANNOUNCED, NONE, ROOT, UNANNOUNCED, ModelSpec, UnitSpec, most_demanding
from shardwise.spec.tensor import TensorSpec

__all__ = ["ANNOUNCED", "NONE", "ROOT", "UNANNOUNCED", "ModelSpec", "TensorSpec", "UnitSpec", "most_demanding"]
