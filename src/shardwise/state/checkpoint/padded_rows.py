"""Weights whose last rows are padding. A checkpoint has only the rows before, so it does not depend on the padding."""

from torch import nn


class PaddedRows:
    """A module whose `weight` has one row per token of a vocabulary; further rows are padding."""

    vocab_size: int


def vocabularies(model: nn.Module) -> dict[str, int]:
    """Return the parameters with padded rows → the number of rows before the padding."""
    return {
        f"{path}.weight": module.vocab_size for path, module in model.named_modules() if isinstance(module, PaddedRows)
    }
