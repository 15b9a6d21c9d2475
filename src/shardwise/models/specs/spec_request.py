"""What the spec of a model depends on, besides the traces that are asked for."""

from dataclasses import dataclass, replace

from shardwise.models.adaptation import Adaptation
from shardwise.models.catalogue import kind_of
from shardwise.plan import Plan
from shardwise.plan.policy import AUTO_UNITS

Way = tuple[str, str]
"""(dtype that computes, recompute or its name in COMPILED)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRequest:
    """A model as a plan runs it.

    reference    its name; of a task that the caller gave (is_given), that of its class
    seq, image   length of a sample in tokens, width of an image in pixels; None: the model's own
    kernels      those of a cuda or cpu device
    adaptation   LoRA or QLoRA instead of training all parameters
    units        the policy by which the model is cut, as in a plan
    tile         modules that compute in tiles of so many tokens, as in a plan
    fp8          weights that are multiplied in fp8
    """

    reference: str
    is_given: bool = False
    seq: int | None = None
    image: int | None = None
    kernels: str = "cuda"
    adaptation: Adaptation | None = None
    units: str = AUTO_UNITS
    tile: frozenset[tuple[str, int]] = frozenset()
    fp8: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """Return the part of its reference before the colon (catalogue.kind_of); `task` for a task that was given."""
        return "task" if self.is_given else kind_of(self.reference)[0]

    @property
    def is_plain(self) -> bool:
        """Return whether the model is asked for by name, without adapters, tiles or other units, and for a GPU."""
        is_changed = self.adaptation is not None or bool(self.tile) or self.units != AUTO_UNITS
        return not self.is_given and not is_changed and self.kernels == "cuda"

    def under(self, plan: Plan) -> "SpecRequest":
        """Return the model in the units and tiles of a plan."""
        return replace(self, units=plan.units, tile=frozenset(plan.tile.items()))
