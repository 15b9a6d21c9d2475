"""Steps captured by hand are the ordinary steps of the same engine: torch's DDP and fully_shard on one NCCL rank."""

import pytest
import torch

from shardwise.base.errors import InvalidData
from shardwise.comm.job.join import joined
from shardwise.measure.bench.contestants import plan_for
from shardwise.measure.bench.graph_update import GraphUpdate, counts_on_device
from shardwise.measure.bench.run_files import BenchRun
from shardwise.measure.bench.subject import BenchTraining, start
from shardwise.plan import Plan
from shardwise.training.config.config import TrainConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_STEPS = 16


def started(engine: str, strategy: str, *, precision: str, clip_norm: float) -> BenchTraining:
    plan = Plan(micro_batch=4, accumulate=2, precision=precision, compile="aot_eager")
    config = TrainConfig.from_dict(
        {
            "task": {"model": "gpt-tiny", "dataset": "random", "seq": 64},
            "plan": plan_for(engine, strategy, plan).to_dict(),
            "optimizer": {"fused": True, "lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_steps": 3},
            "train": {"steps": NUM_STEPS, "clip_norm": clip_norm},
            "run": {"device": "cuda", "folder": "runs/x"},
        }
    )
    with joined(torch.device("cuda", 0)) as place:
        subject = start(BenchRun(config=config, engine=engine), place=place)
    if engine == "torch":
        # A rate that lies on the device is rounded to fp32.
        counts_on_device(subject.training.optimizer, device=subject.training.device)
    return subject


def taken(subject: BenchTraining) -> list[float]:
    steps = [subject.step() for _ in range(NUM_STEPS)]
    return [value.item() for step in steps for value in (step.loss, step.grad_norm) if value is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torch_captured_trains_as_torch_does(strategy: str, clip_norm: float, precision: str) -> None:
    ordinary, captured = (
        started(engine, strategy, precision=precision, clip_norm=clip_norm) for engine in ("torch", "torch-captured")
    )
    assert isinstance(captured.training.update, GraphUpdate)
    assert taken(captured) == taken(ordinary)


def test_torch_compiled_trains_as_torch_does() -> None:
    ordinary, compiled = (
        started(engine, "fsdp", precision="bf16", clip_norm=1.0) for engine in ("torch", "torch-compiled")
    )
    assert taken(compiled) == pytest.approx(taken(ordinary), rel=2e-2)


def test_a_batch_of_another_size_is_refused() -> None:
    subject = started("torch-captured", "ddp", precision="fp32", clip_norm=0.0)
    for _ in range(13):
        subject.step()
    training = subject.training
    with pytest.raises(InvalidData, match="another batch than the one it was captured with"):
        training.update(training, (0.5, 0.5), [(batch[0][:2], batch[1][:2]) for batch in (next(training.batches),) * 2])
