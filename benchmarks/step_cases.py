"""What step_times.py measures: trainings, most important first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training. `captured`: the whole step is one CUDA graph."""

    model: str
    batch: int
    seq: int | None = None
    image: int | None = None
    engine: str = "shardwise"
    strategy: str = "fsdp"
    recompute: str = "none"
    precision: str = "bf16"
    captured: bool = False

    def __str__(self) -> str:
        how = "captured" if self.captured else "eager"
        size = f"{self.batch} × {self.seq or self.image}"
        return f"{self.model:13} {size:9} {self.engine:9} {self.strategy:5} {how:8} recompute {self.recompute:4}"


# (model, batches, the rest of a case)
_SIZES: dict[str, tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...]] = {
    "cuda": (
        ("gpt2-124m", (4, 16), {"seq": 1024}),
        ("gpt-1.3b", (2, 8), {"seq": 2048}),
        ("llama-3.2-1b", (1, 4), {"seq": 2048}),
        ("vit-large", (16, 64), {"image": 224}),
        ("resnet50", (32, 128), {"image": 224}),
    ),
    "cpu": (
        ("gpt-tiny", (2,), {"seq": 64, "precision": "fp32"}),
        ("llama-tiny", (2,), {"seq": 64, "precision": "fp32"}),
        ("vit-digits", (8,), {"image": 8, "precision": "fp32"}),
        ("resnet-digits", (8,), {"image": 8, "precision": "fp32"}),
    ),
}
# The smaller batch of each model first.
MODELS = {
    device: tuple(
        Case(model=model, batch=batches[which], **rest)
        for which in (0, 1)
        for model, batches, rest in sizes
        if which < len(batches)
    )
    for device, sizes in _SIZES.items()
}
# What is tried of each, most important first.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"captured": True},
    {"engine": "torch"},
    {"engine": "torch", "strategy": "ddp"},
    {"recompute": "full"},
    {"recompute": "full", "captured": True},
    {"strategy": "ddp"},
    {"recompute": "full", "engine": "torch"},
    {"strategy": "ddp", "captured": True},
)


def all_cases(device: str) -> Iterator[Case]:
    for way in WAYS:
        for case in MODELS[device]:
            if device == "cuda" or "captured" not in way:
                yield replace(case, **way)
