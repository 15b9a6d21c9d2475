"""`lean_loss`: the loss of a Hugging Face language model without fp32 copies of its logits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.own.lean_loss import lean_cross_entropy_of_some

_CAUSAL = "ForCausalLM"


def lean_loss(model: nn.Module) -> None:
    """Make a causal language model of `transformers` compute its loss in parts, with any trainer.

    The usual loss holds three fp32 copies of the logits, which is the memory peak of a step for a large vocabulary. The
    values are the same up to rounding, the logits stay readable, and backward can run once.
    """
    found: list[Any] = [module for module in model.modules() if getattr(module, "loss_type", None) == _CAUSAL]
    if not found:
        raise InvalidModel(
            f"shardwise.lean_loss: {type(model).__name__} has no causal language model of transformers inside, whose "
            "loss it could replace"
        )
    for module in found:
        usual = module.loss_function
        if not isinstance(usual, LeanCausalLoss):
            module.loss_function = LeanCausalLoss(usual)


class LeanCausalLoss:
    """Replaces transformers' ForCausalLMLoss, which it calls without gradients."""

    def __init__(self, usual: Callable[..., Tensor]) -> None:
        self._usual = usual

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        # The loss of a head in tiles is computed in tiles anyway.
        if not (torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad):
            options |= {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._usual(logits, labels, vocab_size, shift_labels=shift_labels, **options)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        count = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=logits.device)
        return lean_cross_entropy_of_some(logits.view(-1, vocab_size), targets, ignored=ignore_index, count=count)
