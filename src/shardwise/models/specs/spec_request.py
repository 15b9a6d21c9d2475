"""What the spec of a model depends on, besides the traces that are asked for.

LoRA or QLoRA, as a plan or a training asks for it.
"""

from dataclasses import dataclass, replace

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.models.catalogue import kind_of
from shardwise.plan import Plan
from shardwise.plan.patterns import AUTO_UNITS

QUANTIZED = ("nf4",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """Adapters on a frozen base: W + alpha/rank · B·A, with A and B of `rank`.

    targets    names of the linear layers that get them (q_proj, v_proj); none: all of the blocks
    quantize   how linear layers of the blocks are stored: None (as the base) or nf4
    dtype      of the adapters: fp32, as PEFT makes them, or that of the base
    base       dtype of the base
    alpha      scale of the adapters; None: twice the rank
    """

    rank: int
    targets: tuple[str, ...] = ()
    quantize: str | None = None
    dtype: str = "float32"
    base: str = "bfloat16"
    alpha: float | None = None

    def __str__(self) -> str:
        where = ", ".join(self.targets) or "all linear layers"
        return f"{'QLoRA (nf4)' if self.quantize else 'LoRA'} rank {self.rank} on {where}"


def adaptation_of(
    lora: int | None, *, targets: str | None, quantize: str | None, precision: str = "bf16"
) -> Adaptation | None:
    """Return what the options --lora, --lora-targets and --quantize ask for; None without --lora.

    The base has the dtype that computes. With --precision native adapters have it too: nothing casts them.
    """
    if quantize is not None and quantize not in QUANTIZED:
        raise UnknownName.of("quantisation", quantize, known=QUANTIZED)
    if lora is None:
        for option, value in (("--lora-targets", targets), ("--quantize", quantize)):
            if value is not None:
                raise InvalidPlan(
                    f"{option} {value}: needs --lora RANK, since a frozen base without adapters learns nothing"
                )
        return None
    names = tuple(name.strip() for name in (targets or "").split(",") if name.strip())
    dtype = "bfloat16" if precision == "native" else "float32"
    base = "float16" if precision == "fp16" else "bfloat16"
    return Adaptation(rank=lora, targets=names, quantize=quantize, dtype=dtype, base=base)


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
