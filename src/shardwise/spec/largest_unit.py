"""A unit that holds most of a model: sharding then gathers nearly all of it at once, and saves little."""

from shardwise.spec.model import ModelSpec

# Below that nobody runs out of memory for it.
_LEAST_PARAMS = 2**20
# A model in about so many pieces gathers little at once.
_PIECES = 16


def why_hardly_cut(spec: ModelSpec, *, units: str) -> str:
    """One line where one unit holds more than half of the parameters; "" where none does, or nothing can be done.

    units    the plan's policy. `none` asks for it.
    """
    largest = max(spec.units, key=lambda unit: unit.num_params)
    longest = max((param.num_elements for param in largest.params), default=0)
    if units == "none" or 2 * largest.num_params <= spec.num_params or largest.num_params < _LEAST_PARAMS:
        return ""
    if 2 * longest > spec.num_params:
        # One tensor, such as a large embedding: a unit holds it whole in any case.
        return ""
    share = largest.num_params / spec.num_params
    piece = _rounded(spec.num_params // _PIECES)
    return (
        f"units = {units!r} leaves {share:.0%} of {spec.name}'s parameters in one unit, {largest.name}, which is "
        f"gathered at once: units = 'min-params:{piece}' cuts by size, 'auto + MODULE + …' by name"
    )


def _rounded(count: int) -> int:
    """Down to one digit and zeros."""
    scale: int = 10 ** (len(str(count)) - 1)
    return count // scale * scale
