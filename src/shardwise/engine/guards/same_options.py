"""Compares the options of optimizers across ranks: with different learning rates, slices would be trained differently.

A number for all options rides along in the first flag (same_order.py), and only if the flags differ are options
exchanged. Rates that are tensors on a GPU are hashed there, so that no rank waits for them.

Only an optimizer's own options (its `defaults`) are compared: it may keep other values per group, as a count of the
steps in which this rank had parameters.

Without it the model is a mixture of trainings, with no error: replicas stay equal, since each slice has one owner.
Since 0de77b37.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

# 2^32 / golden ratio, as in comm/issued.py.
_SPREAD = 0x9E3779B1
_MASK = 0xFFFFFFFF
# Ranks on different machines may compute a schedule with different last bits.
_TOLERANCE = 1e-6
_NUMBERS = frozenset({bool, int, float})

Options = dict[int, list[dict[str, Any]]]
"""Number of an optimizer → option → value, for each param group."""


class OptimizerOptions:
    """The options of a model's optimizers; `numbers`: each optimizer's number, the same on all ranks."""

    def __init__(self, numbers: Mapping[Optimizer, int]) -> None:
        self._numbers = numbers

    def fold(self) -> int:
        """Return a number for all options that are numbers on the host."""
        # fp32: without the last digits.
        found = array("f")
        for optimizer in self._numbers:
            options = tuple(optimizer.defaults)
            for group in optimizer.param_groups:
                for value in map(group.get, options):
                    if type(value) in _NUMBERS:
                        found.append(value)  # type: ignore[arg-type]
                    elif value is not None:
                        found.extend(_numbers_in(value))
        return crc32(found)

    def fold_rates(self, device: torch.device) -> Tensor | None:
        """Return a number for the learning rates on this GPU, as a tensor; None if there are none."""
        if device.type == "cpu":
            return None
        rates = [rate for group in self._groups() if isinstance(rate := group.get("lr"), Tensor)]
        rates = [rate.detach().reshape(()).float() for rate in rates if rate.device == device]
        if not rates:
            return None
        bits = torch.stack(rates).view(torch.int32).long()
        odd = torch.arange(1, 2 * len(rates), 2, device=bits.device)
        return (bits * odd).sum() * _SPREAD & _MASK

    def values(self) -> Options:
        """Return all options that are numbers or tensors of one. Waits for a GPU."""
        return {
            number: [
                {option: _shown(group[option]) for option in optimizer.defaults if option in group}
                for group in optimizer.param_groups
            ]
            for optimizer, number in self._numbers.items()
        }

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._numbers for group in optimizer.param_groups]


def first_different_option(everyone: Sequence[Options]) -> str:
    """Describe the first option in which ranks differ, or return "". An optimizer that one rank has dropped is none."""
    none: dict[str, Any] = {}
    for rank, theirs in enumerate(everyone):
        for number in sorted(everyone[0].keys() & theirs.keys()):
            for index, (one, other) in enumerate(zip_longest(everyone[0][number], theirs[number], fillvalue=none)):
                for option in {**one, **other}:
                    ours, its = one.get(option), other.get(option)
                    if not _alike(ours, its):
                        whose = f" of optimizer {number + 1}" if len(everyone[0]) > 1 else ""
                        return f"param_groups[{index}]['{option}']{whose} is {ours} on rank 0, {its} on rank {rank}"
    return ""


def different_options(difference: str) -> str:
    """Return the error message for the first difference."""
    return (
        f"ranks train with different options: {difference}; each would update its part of the model by its own. Give "
        "all ranks the same value: a scheduler that follows a loss (ReduceLROnPlateau) needs the mean over all ranks, "
        "for example torch.distributed.all_reduce(loss) before scheduler.step(loss)"
    )


def _numbers_in(value: Any) -> Sequence[float]:
    """Return the numbers of an option on the host: of a pair of betas, or of a tensor on the CPU."""
    if isinstance(value, Tensor):
        return [float(value.detach())] if value.device.type == "cpu" and value.numel() == 1 else []
    if isinstance(value, tuple):
        return [number for part in value for number in _numbers_in(part)]
    return [value] if isinstance(value, int | float) else []


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    return value if isinstance(value, int | float | str) else None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (one != one and other != other)
    return bool(one == other)
