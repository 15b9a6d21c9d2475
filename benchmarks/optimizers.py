"""Optimizers under every kind of strategy, on 2 CPU ranks, against one process: `python benchmarks/optimizers.py`.

A small GPT is trained for 4 steps by each optimizer: in one process, which sums the ranks' gradients in rank order, and
by both ranks under `ddp`, `zero1`, `zero2` and `fsdp`. Weights are compared bit for bit. Writes the table in
docs/engine.md. The exit code is 1 if a training that was not refused gave other weights. bitsandbytes is left out where
it is not installed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.errors import ShardwiseError
from shardwise.tasks import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engine.md"
BEGIN, END = "<!-- rows: python benchmarks/optimizers.py -->", "<!-- end of rows -->"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
NUM_STEPS = 4
# The small models and optimizers of the tests.
sys.path.insert(0, str(ROOT / "tests" / "dist"))

Make = Callable[[Any], torch.optim.Optimizer]


def optimizers() -> dict[str, Make]:
    import given_optimizers as own

    found: dict[str, Make] = {
        f"`torch.optim.{name}`": partial(getattr(torch.optim, name), lr=1e-2)
        for name in (
            *("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"),
            "Adafactor",
        )
    }
    found["`torch.optim.Muon` (matrices)"] = lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=2e-2)
    found |= {
        "Lion": own.Lion,
        "cautious Lion": own.CautiousLion,
        "LARS, a subclass of SGD": partial(own.Lars, lr=0.1, momentum=0.9),
        "LAMB": own.Lamb,
        "Shampoo, diagonal roots": own.Shampoo,
        "Adam, 8-bit states in blocks of 256": partial(own.BlockAdam, block=256),
        "norms of matrices only": own.ByDimensions,
        "a step size from all gradients": own.Prodigy,
        "learning rates by place in a group": own.LayerDecay,
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        found["bitsandbytes `AdamW(optim_bits=8)`"] = partial(bitsandbytes.optim.AdamW, lr=1e-2, optim_bits=8)
        found["the same, `min_8bit_size=0`"] = partial(bitsandbytes.optim.AdamW, lr=1e-2, optim_bits=8, min_8bit_size=0)
        found["bitsandbytes `Lion8bit`"] = partial(bitsandbytes.optim.Lion8bit, lr=1e-3)
    return found


def in_one_process(make: Make) -> dict[str, torch.Tensor]:
    """What both ranks' batches give in one process."""
    from cases import MODELS

    torch.manual_seed(1)
    model, batch = MODELS["gpt"]()
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(2):
            model.zero_grad()
            cross_entropy(model, batch(step, rank)).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total / 2
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def cell(make: Make, strategy: str, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a strategy made of an optimizer, on this rank."""
    from cases import MODELS

    torch.manual_seed(1)
    model, batch = MODELS["gpt"]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer = shardwise.prepare(model, make(model.parameters()), shardwise.Plan(strategy=strategy))
    except ShardwiseError as error:
        return {"refused": str(error)}
    for step in range(NUM_STEPS):
        cross_entropy(model, batch(step, int(os.environ["RANK"]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    distance = max(
        float((weights[name] - weight).abs().max() / weight.abs().max()) for name, weight in expected.items()
    )
    equal = all(torch.equal(weights[name], weight) for name, weight in expected.items())
    return {"distance": 0.0 if equal else distance, "owned": bool(engine_of(model).plan.owned)}


def rank_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Of one rank: optimizer → strategy → outcome."""
    torch.set_num_threads(1)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for name, make in optimizers().items():
        expected = in_one_process(make)
        rows[name] = {strategy: cell(make, strategy, expected) for strategy in STRATEGIES}
    return rows


def shown(one: dict[str, Any], notes: list[str]) -> str:
    if "refused" in one:
        if one["refused"] not in notes:
            notes.append(one["refused"])
        return f"refused ({notes.index(one['refused']) + 1})"
    how = "equal" if one["distance"] == 0 else f"within {one['distance']:.1g}"
    return f"{how}, OWNED" if one["owned"] else how


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    notes: list[str] = []
    lines = [f"| optimizer | {' | '.join(f'`{name}`' for name in STRATEGIES)} |", "|---" * (1 + len(STRATEGIES)) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(shown(row[strategy], notes) for strategy in STRATEGIES)} |")
    lines.append("")
    lines += [f"{number}. `{note}`" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print what was found, and write nothing")
    parser.add_argument("--rank-to", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_to:
        (asked.rank_to / os.environ["RANK"]).write_text(json.dumps(rank_rows()))
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        subprocess.run([*launcher, __file__, "--rank-to", folder], check=True, env=environment)
        rows, other = (json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2))
    assert rows.keys() == other.keys()
    wrong = [
        f"{name} under {strategy}: {one}"
        for of_rank in (rows, other)
        for name, row in of_rank.items()
        for strategy, one in row.items()
        if one.get("distance", 0)
    ]
    if asked.json:
        print(json.dumps(rows, indent=1))
    else:
        start, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{start}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
