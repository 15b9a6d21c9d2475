"""What `--strategy` asks for."""

from shardwise.engine_limits import strategies_of
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.placement import STRATEGIES


def asked_strategies(asked: str, *, engine: str) -> list[str]:
    """The strategy of that name; of `all`, those that the engine can run."""
    if asked not in (*STRATEGIES, "all"):
        raise UnknownName.of("strategy", asked, known=(*STRATEGIES, "all"))
    found = [name for name in strategies_of(engine) if asked in (name, "all")]
    if not found:
        raise InvalidPlan(f"--strategy {asked}: {engine} has no engine for it; use --engine shardwise")
    return found
