"""A unit that holds most of a model: sharding then gathers nearly all of it at once, and saves little."""

from shardwise.spec.model import ModelSpec

# A smaller unit never causes a lack of memory.
_LEAST_PARAMS = 2**20
# The advice aims at about this many units.
_PIECES = 16


def why_hardly_cut(spec: ModelSpec, *, units: str) -> str:
    """Return a warning if one unit holds more than half of the parameters; "" if none does or nothing would help.

    `units` is the plan's policy; `none` asks for a single unit.
    """
    largest = max(spec.units, key=lambda unit: unit.num_params)
    longest = max((param.num_elements for param in largest.params), default=0)
    if units == "none" or 2 * largest.num_params <= spec.num_params or largest.num_params < _LEAST_PARAMS:
        return ""
    if 2 * longest > spec.num_params:
        # One tensor, such as a large embedding: it is in one unit under every policy.
        return ""
    share = largest.num_params / spec.num_params
    count = spec.num_params // _PIECES
    # Rounded down to one digit and zeros.
    scale: int = 10 ** (len(str(count)) - 1)
    return (
        f"units = {units!r} leaves {share:.0%} of {spec.name}'s parameters in one unit, {largest.name}, which is "
        f"gathered at once: units = 'min-params:{count // scale * scale}' cuts by size, 'auto + MODULE + …' by name"
    )
