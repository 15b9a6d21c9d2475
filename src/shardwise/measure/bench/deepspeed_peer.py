"""Sets up the same training on DeepSpeed: `deepspeed.initialize`, with ZeRO at the stage of the strategy."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.measure.bench.contestants import STAGES
from shardwise.measure.bench.peer_setup import job_variables, make_real
from shardwise.training.config.config import TrainConfig
from shardwise.training.loop.batches import to_device
from shardwise.training.loop.training_state import Training, Update


def by_deepspeed(
    model: nn.Module, optimizer: Optimizer, *, config: TrainConfig, device: torch.device
) -> tuple[nn.Module, Optimizer, Update]:
    """Return DeepSpeed's engine as the model, and the optimizer that it steps."""
    import deepspeed

    make_real(model, optimizer, plan=config.plan, device=device)
    with job_variables(device):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(config))

    def update(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
        total = torch.zeros((), device=training.device)
        for weight, batch in zip(weights, batches, strict=True):
            loss = training.task.loss(training.model, to_device(batch, training.device)) * weight
            # The weight already divides by the number of passes.
            engine.backward(loss, scale_wrt_gas=False)
            # DeepSpeed steps only after the last pass.
            engine.step()
            total += loss.detach()
        norm = engine.get_global_grad_norm()
        return total, None if norm is None else torch.as_tensor(norm, device=training.device)

    return engine, optimizer, update


def settings(config: TrainConfig) -> dict[str, Any]:
    plan = config.plan
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_clipping": config.train.clip_norm,
        "bf16": {"enabled": plan.precision == "bf16"},
        "communication_data_type": plan.reduce_dtype,
        "zero_optimization": {
            "stage": STAGES[plan.strategy],
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": plan.bucket_bytes // 4,
        },
        # Any elementwise optimizer is allowed.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
