"""What Lightning's users do besides plain fitting, under our strategies, against one process of Lightning."""

from typing import Any

import pytest
import torch
from lightning_runs import difference, fit, make_mlp, needs_lightning
from ranks import run_ranks
from torch import Tensor, nn
from whole import whole

STRATEGIES = ["fsdp", *whole("ddp", "zero2")]


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
    assert max(run_ranks(difference, num_ranks=2, args=(finetuned, strategy), timeout_seconds=150.0)) < 1e-6
