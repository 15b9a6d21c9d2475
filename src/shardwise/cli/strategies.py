"""What `--strategy` asks for."""

from shardwise.engine_limits import strategies_of
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.placement import AUTO, STRATEGIES


def asked_strategies(asked: str, *, engine: str) -> list[str]:
    """The strategy of that name; of `all`, and of `auto`, which is shown beside them, those that the engine can run."""
    known = (*STRATEGIES, "all", AUTO)
    if asked not in known:
        raise UnknownName.of("strategy", asked, known=known)
    found = [name for name in strategies_of(engine) if asked in (name, "all", AUTO)]
    if not found:
        raise InvalidPlan(f"--strategy {asked}: {engine} has no engine for it; use --engine shardwise")
    return found
