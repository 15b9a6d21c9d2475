"""Loss curves in bf16 and in fp8: `python benchmarks/fp8_numerics.py [--device cpu] [--size small] [--seeds 3]`.

A Llama on byte tokens of the Python standard library's sources (dataset `stdlib`), AdamW, a learning rate that warms up
and decays, gradients clipped to norm 1. Each seed draws its own weights and its own order of samples; the ways of one
seed see the same ones. `bf16` is trained with several seeds, whose final losses spread; fp8 is as good if its final
losses are within that spread. Losses are of held-out text, and the curve is the training loss in means of 20 steps.
Writes benchmarks/results/fp8_numerics_DEVICE.json after every run; runs of other ways and seeds are kept.

    --size large   width 2048, 6 layers: large enough for the default fp8_min_features (for a GPU)
    --size small   width 128, 4 layers, fp8 forced by fp8_min_features = 16 (for a CPU, where fp8 is emulated by casts)
"""

from math import cos, pi
from statistics import mean
from typing import Any

import measuring
import torch
from torch import Tensor

import shardwise
from shardwise import Plan
from shardwise.models.data.text import stdlib_tokens
from shardwise.models.make import build_model
from shardwise.models.shapes import LlamaShape
from shardwise.models.tasks import cross_entropy

WAYS = {
    "bf16": {"precision": "bf16"},
    "tensorwise": {"precision": "fp8", "fp8_recipe": "tensorwise"},
    "rowwise": {"precision": "fp8", "fp8_recipe": "rowwise"},
}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"width": 128, "layers": 4, "heads": 4, "ffn": 384, "seq": 128, "batch": 16, "lr": 2e-3, "least": 16},
    "large": {"width": 2048, "layers": 6, "heads": 16, "ffn": 5632, "seq": 1024, "batch": 8, "lr": 3e-4},
}
_HELD_OUT = 8
_MEAN_OF = 20
_WARM_UP = 20


class Text:
    """Samples of the text; its last tenth is held out."""

    def __init__(self, *, seq: int, batch: int, device: str, seed: int) -> None:
        tokens = torch.from_numpy(stdlib_tokens()).long()
        self._seq, self._batch, self._device = seq, batch, device
        border = len(tokens) * 9 // 10
        self._train, self._rest = tokens[:border], tokens[border:]
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self._train) - self._seq - 1, (self._batch,), generator=self._generator)
        return self._cut(self._train, starts.tolist())

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        step = (len(self._rest) - self._seq - 1) // (_HELD_OUT * self._batch)
        starts = [number * step for number in range(_HELD_OUT * self._batch)]
        return [self._cut(self._rest, starts[at::_HELD_OUT]) for at in range(_HELD_OUT)]

    def _cut(self, tokens: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        cut = torch.stack([tokens[start : start + self._seq + 1] for start in starts]).to(self._device)
        return cut[:, :-1], cut[:, 1:]


def train(way: str, *, seed: int, size: str, steps: int, device: str) -> dict[str, Any]:
    """Train one model; return its curve and the loss of held-out text."""
    given = SIZES[size]
    torch.manual_seed(seed)
    shape = LlamaShape(
        num_layers=given["layers"], width=given["width"], num_heads=given["heads"], num_kv_heads=given["heads"],
        ffn_width=given["ffn"], vocab_size=256, max_seq=given["seq"],
    )  # fmt: skip
    model = build_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], weight_decay=0.1, betas=(0.9, 0.95))
    least = {"fp8_min_features": given["least"]} if "least" in given and way != "bf16" else {}
    plan = Plan(strategy="fsdp", compile="inductor" if device == "cuda" else "none", **WAYS[way], **least)
    shardwise.prepare(model, optimizer, plan, device=device)
    text = Text(seq=given["seq"], batch=given["batch"], device=device, seed=seed)
    losses: list[Tensor] = []
    for step in range(steps):
        share = min(1.0, (step + 1) / _WARM_UP) * (0.1 + 0.45 * (1 + cos(pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = given["lr"] * share
        loss = cross_entropy(model, text.next())
        loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses).view(-1, _MEAN_OF).mean(1).tolist() if steps % _MEAN_OF == 0 else []
    with torch.no_grad():
        final = mean(cross_entropy(model, batch).item() for batch in text.held_out())
    return {"way": way, "seed": seed, "size": size, "steps": steps, "held_out_loss": final, "curve": curve}


def main() -> None:
    asked = measuring.options(__doc__, device="cuda", size="large", seeds=3, steps=300, ways=list(WAYS), out=None)
    out = asked.out or measuring.RESULTS / f"fp8_numerics_{'h200' if asked.device == 'cuda' else 'cpu'}.json"
    with measuring.job(asked.device):
        for seed in range(asked.seeds):
            for way in asked.ways:
                torch._dynamo.reset()
                measuring.free()
                row = train(way, seed=seed, size=asked.size, steps=asked.steps, device=asked.device)
                print(f"{way:10} seed {seed}: held-out loss {row['held_out_loss']:.4f}", flush=True)
                measuring.replace_rows(out, [row], key=lambda one: (one["way"], one["seed"], one["size"]))


if __name__ == "__main__":
    main()
