"""Parses the values of `--strategy` and `--engines`."""

from collections.abc import Iterable, Sequence

from shardwise.errors import InvalidPlan, UnknownName
from shardwise.plan.limits import strategies_of
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import AUTO, STRATEGIES, resolve_strategy


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
