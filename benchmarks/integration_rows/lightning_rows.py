"""Lightning's Trainer and Fabric: ours against their own DDP. One rank; torchrun starts it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from comparison import OTHER, STOCK, Trained, compare, distance
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardwise.integrations import ShardwiseFabricStrategy, ShardwiseStrategy


class Blocks(lightning.LightningModule):
    """A small network, whose training_step calls forward and more of the module than that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.other_head = nn.Linear(8, 2)
        self.numbers: list[float] = []

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y) + nn.functional.mse_loss(self.other_head(x.repeat(1, 2)), y)
        self.numbers.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.numbers.append(float(self.trainer.callback_metrics["val_loss"]))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def samples(num_samples: int) -> TensorDataset:
    inputs = torch.arange(4.0 * num_samples).view(num_samples, 4) / num_samples
    return TensorDataset(inputs, inputs[:, :2].sin())


def make_trainer(strategy: str, folder: Path, **options: Any) -> Any:
    warnings.filterwarnings("ignore")
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if strategy == STOCK else ShardwiseStrategy(plan=strategy),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def fitted(strategy: str, folder: Path) -> Trained:
    module = Blocks()
    trainer = make_trainer(strategy, folder, max_epochs=2, enable_checkpointing=False)
    trainer.fit(module, DataLoader(samples(24), batch_size=2), DataLoader(samples(8), batch_size=2))
    predicted = torch.cat(trainer.predict(module, DataLoader(samples(8), batch_size=2)))
    return Trained(numbers=[*module.numbers, *predicted.flatten().tolist()], weights=dict(module.state_dict()))


def resumed(strategy: str, folder: Path) -> Trained:
    """Accumulation and clipping; stopped after two of four epochs, the rest is trained by another strategy."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    loader = DataLoader(samples(24), batch_size=2)
    module = Blocks()
    make_trainer(strategy, folder, max_epochs=4, enable_checkpointing=False, **settings).fit(module, loader)
    whole = Trained(numbers=module.numbers, weights=dict(module.state_dict()))
    if strategy == STOCK:
        return whole
    first, second = Blocks(), Blocks()
    saving = ModelCheckpoint(dirpath=folder, filename="half")
    make_trainer(strategy, folder, max_epochs=2, callbacks=[saving], **settings).fit(first, loader)
    trainer = make_trainer(OTHER[strategy], folder, max_epochs=4, enable_checkpointing=False, **settings)
    trainer.fit(second, loader, ckpt_path=folder / "half.ckpt")
    trained = Trained(numbers=first.numbers + second.numbers, weights=dict(second.state_dict()))
    assert distance(trained, whole) == 0, "a run that was resumed differs"
    return trained


def by_fabric(strategy: str, folder: Path) -> Trained:
    """A Fabric loop with accumulation and clipping, saved in the middle and loaded into other objects."""
    numbers: list[float] = []
    norms: list[float] = []

    def objects() -> Any:
        chosen = FabricDDP() if strategy == STOCK else ShardwiseFabricStrategy(plan=strategy)
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=chosen)
        fabric.launch()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(model, optimizer)
        data = samples(16)
        return fabric, model, optimizer, DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))

    def train(fabric: Any, model: Any, optimizer: Any, loader: Any) -> None:
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            numbers.append(float(loss.detach()))
            if last:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
                optimizer.step()
                optimizer.zero_grad()

    fabric, model, optimizer, loader = objects()
    train(fabric, model, optimizer, loader)
    fabric.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
    fabric, model, optimizer, loader = objects()
    fabric.load(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, loader)
    return Trained(numbers=numbers, norms=norms, weights=dict(model.state_dict()))


ROWS = {
    "Lightning Trainer, validation, predict": (fitted, 0.0),
    "Lightning Trainer, accumulation, clipping, resumed by another strategy": (resumed, 1e-6),
    "Fabric loop, accumulation, clipping, save, load": (by_fabric, 1e-6),
}

if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    compare(ROWS)
