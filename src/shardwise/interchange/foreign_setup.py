"""What a file of another tool says, in our words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InvalidPlan
from shardwise.plan import Plan

_MOST_SETTINGS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSetup:
    """A setup of another tool.

    tool             whose file it is
    plan             the plan that does the same, as near as ours comes
    settings         the file's own keys, flat: `fsdp_config.fsdp_version`
    num_ranks        of the job; None where the file does not say
    foreign          the engine that runs it, for the planner's times ("" for torch's own)
    left_out         a line for each setting that a plan has no word for
    master_dtype     what the optimizer updates
    wraps            classes that become units; None where the file leaves it to the tool or to the model
    wraps_nothing    the whole model is gathered at once
    """

    tool: str
    plan: Plan
    settings: Mapping[str, Any]
    num_ranks: int | None = None
    foreign: str = ""
    left_out: tuple[str, ...] = ()
    master_dtype: str = "fp32"
    wraps: tuple[str, ...] | None = None
    wraps_nothing: bool = False


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as one, with dots in its keys."""
    found: dict[str, Any] = {}
    waiting = [("", table)]
    while waiting:
        prefix, inner = waiting.pop()
        for key, value in inner.items():
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{key}.", value))
            else:
                found[f"{prefix}{key}"] = value
        # A small YAML file can name the same table again and again, one in another.
        if len(found) + len(waiting) > _MOST_SETTINGS:
            raise InvalidPlan(f"more than {_MOST_SETTINGS:,} settings")
    return found


def truth(value: object) -> bool:
    """A switch as these files spell it: true, "true", 1, "yes"."""
    return value.strip().lower() in ("true", "yes", "1", "y") if isinstance(value, str) else bool(value)


def count(value: object, *, default: int = 1) -> int:
    """A whole number of at least 1; the default for `"auto"`, null and what is none."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else default


def names(value: object) -> tuple[str, ...]:
    """Class names, as a list or with commas."""
    if isinstance(value, str):
        value = value.split(",")
    parts = value if isinstance(value, list | tuple) else []
    return tuple(name for part in parts if (name := str(part).strip().rpartition(".")[2]).isidentifier())


def units_of(wraps: tuple[str, ...] | None, *, wraps_nothing: bool) -> str:
    """The plan's words for what is wrapped."""
    if wraps_nothing:
        return "none"
    return f"class:{','.join(wraps)}" if wraps else "auto"
