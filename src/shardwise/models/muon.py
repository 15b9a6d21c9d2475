"""Muon for the matrices of blocks and AdamW for all other parameters, as one optimizer.

torch.optim.Muon accepts only matrices. AdamW updates embeddings, head and vectors with the same learning rate: Muon's
updates are scaled to the size of AdamW's (`match_rms_adamw`; Liu et al. 2025, "Muon is Scalable for LLM Training").
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel
from shardwise.program.spec.block_matrices import is_block_matrix

_UPDATES: Mapping[str, type[Optimizer]] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}


class MuonWithAdamW(Optimizer):
    """The key `update` of a param group names the torch optimizer that steps it and defines its options and state."""

    # Suppresses the message that matrices are owned by single ranks: who chooses Muon expects it.
    takes_whole_matrices = True

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[dict[str, Any]],
        *,
        lr: float,
        muon: Mapping[str, Any],
        adamw: Mapping[str, Any],
    ) -> None:
        # torch's optimizers check the options and write the defaults into their groups.
        parts: dict[str, Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw", **muon)
        }
        rest = list(others)
        if rest:
            parts["adamw"] = torch.optim.AdamW(rest, lr=lr, **adamw)
        groups = [{**group, "update": name} for name, part in parts.items() for group in part.param_groups]
        # torch reads this default of every optimizer.
        super().__init__(groups, {"differentiable": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for name, kind in _UPDATES.items():
                self.param_groups = [group for group in groups if group["update"] == name]
                if self.param_groups:
                    _without_hooks(kind)(self)
        finally:
            self.param_groups = groups
        return loss

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """Create the state of a group; both optimizers' steps call this."""
        found: bool = _UPDATES[group["update"]]._init_group(self, group, *lists)  # type: ignore[attr-defined]
        return found


def _without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the step of an optimizer class without its hooks: they run once, for the enclosing step."""
    step: Any = kind.step
    found: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


def split_off_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (the trainable matrices of blocks, all other trainable parameters)."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in trained if is_block_matrix(name, tuple(parameter.shape))]
    if not matrices:
        raise InvalidModel(
            f"optimizer muon: {type(model).__name__} has no matrix in a layer of a numbered block (such as "
            "blocks.0.attention.weight) that is trained; use adamw"
        )
    others = [parameter for name, parameter in trained if not is_block_matrix(name, tuple(parameter.shape))]
    return matrices, others
