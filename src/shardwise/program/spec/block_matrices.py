"""The parameters that a matrix optimizer such as Muon steps: two-dimensional ones inside blocks. No torch here."""

from shardwise.program.spec.model import ModelSpec


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a matrix of a layer inside a numbered block: `blocks.3.attention.qkv.weight`.

    Embeddings, the head, and parameters directly in a numbered module (`head.1.weight`) are not.
    """
    numbered = [place for place, part in enumerate(name.split(".")) if part.isdigit()]
    return len(shape) == 2 and bool(numbered) and name.count(".") - numbered[0] >= 2


def block_matrices(spec: ModelSpec) -> list[str]:
    params = (param for unit in spec.units for param in unit.params)
    return [param.name for param in params if param.trainable and is_block_matrix(param.name, param.shape)]
