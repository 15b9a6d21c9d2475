"""What `--strategy` asks for."""

from collections.abc import Sequence

from shardwise.errors import InvalidPlan, UnknownName
from shardwise.plan.limits import strategies_of
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import AUTO, STRATEGIES, resolve_strategy


def asked_strategies(asked: str, *, engine: str, mesh: Mesh | None = None) -> list[str]:
    """The strategies of these names; for `all`, and for `auto`, which is compared with them, those of the engine."""
    names = strategy_names(asked, mesh=mesh)
    found = [name for name in strategies_of(engine) if name in names or AUTO in names]
    if not found:
        raise InvalidPlan(f"--strategy {asked}: {engine} has no engine for it; use --engine shardwise")
    return found


def strategy_names(text: str, *, mesh: Mesh | None = None) -> list[str]:
    """Strategies with commas between them, each once and by its own name; `all` stands for all but `auto`."""
    replicate = mesh.replicate if mesh is not None else 1
    parts = (part.strip() for part in text.split(","))
    names = [resolve_strategy(part, replicate=replicate) for part in parts if part]
    return listed(names, text=text, kind="strategy", known=list(STRATEGIES), more=(AUTO,))


def listed(parts: Sequence[str], *, text: str, kind: str, known: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Each name once; `all` stands for those that are known, without `more`."""
    names = list(dict.fromkeys(name for part in parts for name in (known if part == "all" else (part,))))
    for name in names or [text]:
        if name not in (*known, *more):
            raise UnknownName.of(kind, name, known=(*known, *more, "all"))
    return names
