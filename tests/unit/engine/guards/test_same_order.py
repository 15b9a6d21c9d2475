"""The options of optimizers that ranks compare."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.guards.same_order import OptimizerOptions, first_different_option


def adamw(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [], **options}], lr=1e-3)


def folded(optimizer: torch.optim.Optimizer) -> int:
    return OptimizerOptions({optimizer: 0}).fold()


@pytest.mark.parametrize("options", [{"lr": 5e-4}, {"betas": (0.9, 0.95)}, {"weight_decay": 0.0}, {"amsgrad": True}])
def test_each_option_changes_the_number_and_is_named(options: dict[str, Any]) -> None:
    one, other = adamw(), adamw(**options)
    assert folded(one) == folded(adamw())
    assert folded(one) != folded(other)
    everyone = [OptimizerOptions({optimizer: 0}).values() for optimizer in (one, other)]
    (name,) = options
    assert first_different_option(everyone).startswith(f"param_groups[1]['{name}'] is ")


def test_a_rate_may_be_a_tensor_and_what_an_optimizer_counts_for_itself_is_not_compared() -> None:
    optimizer = adamw()
    before = folded(optimizer)
    optimizer.param_groups[1]["lr"] = torch.tensor(1e-3, dtype=torch.float64)
    optimizer.param_groups[1]["step"] = 7
    assert folded(optimizer) == before
    optimizer.param_groups[1]["lr"].fill_(2e-3)
    assert folded(optimizer) != before


def test_halving_a_rate_on_a_device_changes_the_number() -> None:
    """Only the exponent of the number changes, and the flag carries the upper bits of the fold."""
    options = OptimizerOptions({(optimizer := adamw()): 0})
    assert options.fold_rates(torch.device("cuda:7")) is None
    folds = set()
    for rate in (1e-3, 5e-4, 2.5e-4):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = _OnDevice(rate if index else 1e-3)
        fold = options.fold_rates(torch.device("cuda:7"))
        assert fold is not None
        folds.add(int(fold) >> 14)
    assert len(folds) == 3


class _OnDevice(torch.Tensor):
    """A rate on the CPU that says that it is on a GPU."""

    def __new__(cls, rate: float) -> "_OnDevice":
        return torch.tensor(rate).as_subclass(cls)

    def detach(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:7")
