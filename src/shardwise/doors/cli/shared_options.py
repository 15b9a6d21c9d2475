"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.base.errors import InvalidCluster

OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-loop", "adam", "sgd", "muon")
AsJson = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]
DeviceKind = Annotated[str | None, Option("--device", help="cuda or cpu (default: cuda if there is a GPU).")]
Engine = Annotated[str, Option("--engine", help="shardwise, or torch's own DDP and fully_shard.")]
ImageSize = Annotated[int | None, Option("--image", help="Width and height of an image in pixels.")]
LoraRank = Annotated[int | None, Option("--lora", min=1, help="Rank of LoRA adapters, which alone are trained.")]
LoraTargets = Annotated[
    str | None,
    Option("--lora-targets", help="Linear layers with adapters, such as q_proj,v_proj (default: all of the blocks)."),
]
Optimizer = Annotated[str, Option("--optimizer", help=f"{', '.join(OPTIMIZERS)}.")]
Precision = Annotated[str, Option("--precision", help="fp32, bf16, fp16, fp8, or native (the dtypes of the model).")]
Quantize = Annotated[str | None, Option("--quantize", help="With --lora: the frozen base in nf4 (QLoRA).")]
SampleLength = Annotated[int | None, Option("--seq", help="Tokens per sample.")]
SavedPlan = Annotated[Path | None, Option("--save", help="Write the recommended plan as PLAN.toml.")]
Units = Annotated[
    str,
    Option(
        "--units",
        help="The cut into units: auto, blocks, class:NAME,…, min-params:N, leaf or none; + MODULE … adds modules.",
    ),
]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="section.key=value", help="Override one key of CONFIG; may be repeated.")
]
RanksHere = Annotated[
    int | None, Option("--ranks", min=1, help="Ranks to start here (default: the plan's mesh, or one per GPU).")
]


def device_kind(asked: str | None, *, on_cpu: str) -> str:
    """Check the value of --device and return cuda or cpu; `on_cpu` says what the command does with --device cpu."""
    import torch

    if asked not in (None, "cuda", "cpu"):
        raise InvalidCluster(f"--device {asked}: must be cuda or cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InvalidCluster(f"--device cuda: torch finds no GPU here; --device cpu {on_cpu}")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def option_words(options: dict[str, object]) -> list[str]:
    """Return the options as words of a command line, without those that are None."""
    return [word for name, value in options.items() if value is not None for word in (name, str(value))]
