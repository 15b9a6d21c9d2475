"""What Lightning's users do besides plain fitting, under our strategies, against one process of Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_runs import difference, fit, make_mlp, needs_lightning
from ranks import run_ranks
from torch import Tensor, nn
from training import line
from whole import whole

STRATEGIES = ["fsdp", *whole("ddp", "zero2")]


def differs(rank: int, train: str, strategy: str, *arguments: Any) -> float:
    return difference(rank, globals()[train], strategy, *arguments)


def finetuned(name: str | None) -> dict[str, Tensor]:
    import lightning
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Finetuned(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            # The norm's values equal those of the head's at first, though it is another parameter.
            self.backbone = nn.Sequential(make_mlp(4, 8, 8), nn.LayerNorm(8))
            self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return torch.optim.SGD(trained, lr=0.1, momentum=0.5)

    module = Finetuned()
    # Lightning clears gradients from before in its first step.
    sum(parameter.sum() for parameter in module.parameters()).backward()
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)
    trainer = fit(module, name, callbacks=(callback,))
    assert len(trainer.optimizers[0].param_groups) == 2
    names = [group["params"] for group in callback._internal_optimizer_metadata[0]]
    assert [len(group) for group in names] == [4, 6]
    return dict(module.state_dict())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backbone_that_a_callback_thaws_in_mid_run_trains_as_in_one_process(strategy: str) -> None:
    needs_lightning()
    assert max(run_ranks(differs, num_ranks=2, args=("finetuned", strategy), timeout_seconds=150.0)) < 1e-6


def by_hand(name: str | None, how: str) -> dict[str, Tensor]:
    import lightning

    class Gan(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.generator, self.discriminator = make_mlp(4, 8, 2), make_mlp(2, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.generator(x)

        def loss(self, x: Tensor, *, is_real: bool) -> Tensor:
            judged = self.discriminator(x)
            return nn.functional.binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(is_real)))

        def training_step(self, batch: Any, index: int) -> None:
            generators, discriminators = self.optimizers()
            for optimizer in (generators, discriminators):
                if how == "toggled":
                    self.toggle_optimizer(optimizer)
                fake = self(batch[0])
                if optimizer is generators:
                    loss = self.loss(fake, is_real=True)
                else:
                    loss = self.loss(batch[1], is_real=True) + self.loss(fake.detach(), is_real=False)
                if how != "accumulated":
                    optimizer.zero_grad()
                self.manual_backward(loss)
                if how != "accumulated" or index % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
                if how == "toggled":
                    self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.generator, self.discriminator)], []

    module = Gan()
    fit(module, name)
    return dict(module.state_dict())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["plain", "toggled", "accumulated"])
def test_two_networks_that_are_optimized_by_hand_train_as_in_one_process(strategy: str, how: str) -> None:
    needs_lightning()
    assert max(run_ranks(differs, num_ranks=2, args=("by_hand", strategy, how), timeout_seconds=150.0)) < 1e-6


def make_plain() -> Any:
    import lightning

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = make_mlp(4, 8, 2)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Plain()


def resumed(name: str | None, folder: str) -> dict[str, Tensor]:
    """Save between the two passes of an update, and resume from there: the first of them is lost, as in Lightning."""
    import lightning

    path = f"{folder}/{name or f'alone-{dist.get_rank()}'}.ckpt"

    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.current_epoch == 1 and index == 0:
                trainer.save_checkpoint(path)

    fit(make_plain(), name, callbacks=(Saves(),), accumulate_grad_batches=2)
    saved = torch.load(path, weights_only=False)
    module = make_plain()
    fit(module, name, resume=path, accumulate_grad_batches=2)
    moments = saved["optimizer_states"][0]["state"]
    return {
        **module.state_dict(),
        **{f"saved {key}": value for key, value in saved["state_dict"].items()},
        **{f"saved {number} {key}": value for number, kept in moments.items() for key, value in kept.items()},
        "step": torch.tensor(float(saved["global_step"])),
    }


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_in_mid_accumulation_is_lightnings_and_resumes_as_in_one_process(
    strategy: str, tmp_path: Path
) -> None:
    needs_lightning()
    found = run_ranks(differs, num_ranks=2, args=("resumed", strategy, str(tmp_path)), timeout_seconds=150.0)
    assert max(found) < 1e-6


def averaged(name: str | None) -> dict[str, Tensor]:
    from lightning.pytorch.callbacks import WeightAveraging

    module = make_plain()
    assert "Plan.auto(task, cluster=" in line(lambda: fit(module, "auto"))
    if name == "fsdp":
        said = line(lambda: fit(module, name, callbacks=(WeightAveraging(),)))
        assert said.startswith("WeightAveraging averages whole parameters, which fsdp shards: make a shardwise.EMA(")
        name = None
    fit(module, name, callbacks=(WeightAveraging(),))
    return dict(module.state_dict())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_callback_that_averages_weights_trains_as_in_one_process_or_names_shardwises_average(strategy: str) -> None:
    needs_lightning()
    assert max(run_ranks(differs, num_ranks=2, args=("averaged", strategy), timeout_seconds=150.0)) < 1e-6
