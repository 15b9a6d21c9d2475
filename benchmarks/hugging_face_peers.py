"""Hugging Face models under our engine and others, in turn, on one GPU: `python benchmarks/hugging_face_peers.py`.

The models of hugging_face_models.py: bf16, fused AdamW, one NCCL rank, one batch that lies on the device. Each model
runs in a process of its own, in which all engines are set up, and blocks of steps alternate between them. Writes
benchmarks/results/hugging_face_peers_h200.json after every model; a model that is measured with other engines or blocks
is a row of its own there.

    default          ours by default: `fsdp`, units as CUDA graphs; `default ddp` likewise
    fsdp, ddp        ours with capture = "off"
    … lean, compiled with `shardwise.lean_loss(model)`, and with units compiled by Inductor
    fully_shard      torch's own, cut into the same units
    torch_ddp        torch's DistributedDataParallel under autocast
    accelerate       Accelerate's FSDP2 (transformer_based_wrap), without gradient checkpointing
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import measuring
import torch
import workers
from hugging_face_models import MODELS, build
from measuring import RESULTS

import shardwise
from shardwise import Plan
from shardwise.comm.job.absent import AbsentCollectives
from shardwise.engine.torch_engine.prepare import prepare_on_torch

# Models that the host bounds are compared with more engines.
_BY_DEFAULT = ("default", "torch_ddp", "accelerate")
ENGINES = {
    "qwen3-0.6b": (*_BY_DEFAULT, "fsdp", "fully_shard", "ddp"),
    "gemma3-1b": _BY_DEFAULT,
    "bert-large": (*_BY_DEFAULT, "fsdp", "fully_shard", "ddp"),
    "llama-1b": _BY_DEFAULT,
}
# Of step times.
RATIOS = (
    *(("default", "accelerate"), ("default", "torch_ddp"), ("fsdp", "fully_shard"), ("ddp", "torch_ddp")),
    *(("default ddp", "accelerate"), ("default ddp", "torch_ddp"), ("fsdp", "accelerate"), ("default", "fully_shard")),
    *((f"default{words}", "accelerate") for words in (" lean", " ddp lean", " ddp lean compiled")),
)
# Until units are replayed.
WARM_UP = 15


def step_of(engine: str, model: Any, *, collectives: AbsentCollectives | None = None) -> Callable[[Any, Any], Any]:
    """Return a training step of the model under an engine, which is given tokens and a mask, and returns the loss.

    `collectives`: those of a rehearsal.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    backward: Callable[[Any], None] = torch.Tensor.backward
    words = engine.split()
    if engine == "accelerate":
        model, optimizer, backward = on_accelerate(model, optimizer)
    elif engine in ("torch_ddp", "fully_shard"):
        strategy = "ddp" if engine == "torch_ddp" else "fsdp"
        plan = Plan(strategy=strategy, precision="bf16", engine="torch", capture="off")
        model, optimizer = prepare_on_torch(model, optimizer, plan)
    else:
        plan = Plan(
            strategy="ddp" if "ddp" in words else "fsdp",
            precision="bf16",
            compile="inductor" if "compiled" in words else "none",
            capture="auto" if "default" in words else "off",
        )
        shardwise.prepare(model, optimizer, plan, collectives=collectives)
        if "lean" in words:
            shardwise.lean_loss(model)

    def step(ids: Any, mask: Any) -> Any:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def on_accelerate(model: Any, optimizer: Any, *, checkpointing: bool = False) -> tuple[Any, Any, Callable[[Any], None]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        activation_checkpointing=checkpointing,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def measure(
    make: Callable[[], tuple[Any, Any, Any]],
    *,
    engines: Sequence[str],
    blocks: int,
    collectives: AbsentCollectives | None = None,
) -> dict[str, Any]:
    """Measure all engines in turn. `make`: returns a model, tokens and a mask."""

    def step_under(engine: str) -> Callable[[], Any]:
        model, *batch = make()
        step = step_of(engine, model, collectives=collectives)
        return lambda: step(*batch)

    makes = {engine: partial(step_under, engine) for engine in engines}
    return measuring.compared(makes, warm_up=WARM_UP, blocks=blocks, ratios=RATIOS)


def _measured_as(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], list(row["block_seconds"]), *{len(blocks) for blocks in row["block_seconds"].values()}


def main() -> None:
    out = RESULTS / "hugging_face_peers_h200.json"
    asked = measuring.options(__doc__, models=list(MODELS), engines=[], blocks=5, out=out, here="")
    if asked.here:
        engines = asked.engines or ENGINES[asked.here]
        with measuring.job("cuda"):
            workers.tell(
                {"model": asked.here, **measure(lambda: build(asked.here), engines=engines, blocks=asked.blocks)}
            )
        return
    options = ("--blocks", str(asked.blocks), "--engines", *asked.engines)
    for name, rows in workers.in_processes(__file__, asked.models, *options, limit_seconds=180):
        measuring.show_compared(name, rows[0])
        measuring.replace_rows(asked.out, rows, key=_measured_as)


if __name__ == "__main__":
    main()
