"""LoRA or QLoRA, as a plan or a training asks for it. No torch here."""

from dataclasses import dataclass

from shardwise.errors import InvalidPlan, UnknownName

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
