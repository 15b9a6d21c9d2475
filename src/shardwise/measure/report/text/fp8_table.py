"""Lists the linear layers of a model that multiply in fp8, and why others do not."""

import re
from collections import Counter

from shardwise.plan import Plan
from shardwise.program.buffers import linear_layers
from shardwise.program.spec import ModelSpec


def fp8_lines(spec: ModelSpec, *, plan: Plan) -> list[str]:
    """Return one line per kind of layer, layers of repeated blocks together; nothing under another precision."""
    if not plan.has_fp8:
        return []
    kinds: Counter[tuple[str, str]] = Counter()
    for layer in linear_layers(spec, plan=plan):
        kinds[re.sub(r"\.\d+\.", ".*.", layer.weight.name.removesuffix(".weight")), layer.why_not] += 1
    rows = [
        (name, str(number), f"bf16: {why}" if why else f"fp8, {plan.fp8_recipe}")
        for (name, why), number in kinds.items()
    ]
    heads = ("linear layers", "number", "multiply in")
    widths = [max(len(line[at]) for line in (heads, *rows)) + 2 for at in range(len(heads))]
    return [
        "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (heads, *rows)
    ]
