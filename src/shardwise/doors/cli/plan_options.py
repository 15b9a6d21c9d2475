"""The options of `shardwise plan` as one value, and how they are parsed: counts, meshes, recompute, strategies."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.base.vocabulary.quantities import byte_count
from shardwise.doors.cli.shared_options import OPTIMIZERS
from shardwise.plan.limits import strategies_of
from shardwise.plan.patterns import AUTO_UNITS
from shardwise.plan.placement import AUTO, STRATEGIES, Mesh, resolve_strategy

if TYPE_CHECKING:
    from shardwise.hardware import Cluster


def strategies_for_engine(asked: str, *, engine: str, mesh: Mesh | None = None) -> list[str]:
    """Return the named strategies that the engine has; `auto` is compared with all of them, so it asks for all."""
    names = strategy_names(asked, mesh=mesh)
    found = [name for name in strategies_of(engine) if name in names or AUTO in names]
    if not found:
        raise InvalidPlan(f"--strategy {asked}: {engine} has no engine for it; use --engine shardwise")
    return found


def strategy_names(text: str, *, mesh: Mesh | None = None) -> list[str]:
    """Return strategies that are separated by commas, each once; aliases are resolved, `all` excludes `auto`."""
    replicate = mesh.replicate if mesh is not None else 1
    names = (resolve_strategy(part, replicate=replicate) for part in comma_separated(text))
    return expand_all(names, text=text, kind="strategy", known=list(STRATEGIES), more=(AUTO,))


def comma_separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def expand_all(
    parts: Iterable[str], *, text: str, kind: str, known: Sequence[str], more: Sequence[str] = ()
) -> list[str]:
    """Return each name once; `all` stands for the `known` names. Other names than `known` and `more` are errors."""
    names = list(dict.fromkeys(name for part in parts for name in (known if part == "all" else (part,))))
    for name in names or [text]:
        if name not in (*known, *more):
            raise UnknownName.of(kind, name, known=(*known, *more, "all"))
    return names


GOALS = ("throughput", "memory")
OFFLOADS = ("states", "activations")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that say what is planned, as they are typed; `plan_flags.py` describes them."""

    model: str
    cluster: str
    fabric_gbps: float | None = None
    strategy: str | None = None
    micro_batch: int | None = None
    seq: int | None = None
    lengths: str | None = None
    image: int | None = None
    precision: str = "bf16"
    recompute: str | None = None
    global_batch: int | None = None
    accumulate: int = 1
    accumulate_reduced: bool | None = None
    update: str = "step"
    mesh: str | None = None
    across: str | None = None
    units: str = AUTO_UNITS
    reduce_dtype: str | None = None
    budget: str | None = None
    host_memory: str | None = None
    offload: str | None = None
    lora: int | None = None
    lora_targets: str | None = None
    quantize: str | None = None
    optimizer: str = "adamw"
    goal: str = "throughput"
    engine: str | None = None
    devices: Path | None = None
    software: str | None = None
    attention: str | None = None
    matmul: str | None = None
    norms: str | None = None
    matmul_precision: str | None = None
    compile: str = "none"
    capture: str = "auto"
    like: str = ""
    overlap: str | None = None
    tile: tuple[str, ...] = ()
    loss: str | None = None
    here: bool = False
    tokens: str | None = None
    price: float | None = None
    frontier: bool = False
    scale: bool = False
    timeline: bool = False

    @property
    def command(self) -> str:
        """The command with these options; those that have their default are left out."""
        words = ["shardwise", "plan", self.model]
        for field in fields(self):
            value, name = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name == "model" or value is None or value == field.default:
                continue
            if isinstance(value, bool):
                words += [name] if value else []
            else:
                for one in value if isinstance(value, tuple) else (value,):
                    words += [name, str(one)]
        return shlex.join(words)


def check_names(*, optimizer: str, goal: str = "throughput") -> None:
    for kind, name, known in (("goal", goal, GOALS), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in known:
            raise UnknownName.of(kind, name, known=known)


def parse_count(text: str | None, *, option: str) -> float | None:
    """Parse `1T`, `300B` or `1e12`; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise InvalidPlan(f"{option} {text}: must be a number, such as 1T, 300B or 1e12")
    return float(found[1]) * _COUNTS[found[2]]


def parse_host_memory(text: str | None, *, option: str) -> int | None:
    """Parse `110GiB`, or 0 for none; None if the option is not given."""
    if text is None or text.strip() == "0":
        return None if text is None else 0
    return byte_count(text, key=option)


def parse_offload(text: str | None) -> dict[str, Any]:
    """Parse `states,activations` into the settings of a plan."""
    names = comma_separated(text or "")
    for name in names:
        if name not in OFFLOADS:
            raise UnknownName.of("offload", name, known=OFFLOADS)
    return {f"offload_{name}": True for name in names}


def parse_mesh(text: str | None) -> Mesh | None:
    """Parse `8x4`, replicate × shard; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,6})[x×]([1-9][0-9]{0,6})", text.strip())
    if found is None:
        raise InvalidPlan(f"--mesh {text}: must be REPLICATExSHARD, such as 8x8")
    return Mesh(replicate=int(found[1]), shard=int(found[2]))


def hybrid_mesh(strategy: str, *, cluster: "Cluster") -> Mesh | None:
    """Return nodes × devices per node, the default mesh of `hybrid_shard`; None for any other strategy."""
    if strategy.strip().lower().replace("-", "_") != "hybrid_shard":
        return None
    if cluster.num_nodes == 1:
        raise InvalidPlan(f"--strategy {strategy}: {cluster} is one node; give --mesh, such as 2x4")
    return Mesh(replicate=cluster.num_nodes, shard=cluster.devices_per_node)


def parse_recompute(text: str) -> dict[str, Any]:
    """Parse `full`, or `full,blocks.[0-8]=none`, into the settings of a plan."""
    default, overrides = "none", {}
    for part in (part.strip() for part in text.split(",")):
        pattern, equals, way = part.rpartition("=")
        if equals:
            overrides[pattern] = way
        else:
            default = part
    return {"recompute": default, "recompute_overrides": overrides}


def parse_tile(texts: Iterable[str]) -> dict[str, int]:
    """Parse `*.mlp=8192` into pattern → tokens."""
    found = {}
    for text in texts:
        pattern, equals, tokens = text.partition("=")
        if not (equals and pattern and tokens.isdecimal() and int(tokens)):
            raise InvalidPlan(f"--tile {text}: must be MODULES=TOKENS, such as *.mlp=8192")
        found[pattern] = int(tokens)
    return found
