"""Values of a plan as a file or a caller gives them: checked, or refused in one line by key and value."""

from collections.abc import Iterable
from reprlib import repr as _show
from typing import Any

from shardwise.errors import InvalidPlan
from shardwise.plan.placement import Placement, Where

# What TOML's integers are sure to hold.
_MOST = 2**63 - 1


def some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")


def not_among(key: str, value: object, allowed: Iterable[str]) -> str:
    return f"{key} = {_show(value)}: must be one of {', '.join(allowed)}"


def check_count(name: str, value: object, *, least: int, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise InvalidPlan(f"{name} = {_show(value)}: must be a whole number of at least {least}")


def table_of(name: str, value: object, *, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidPlan(f"{name} = {_show(value)}: must be a table")
    for key in value:
        if allowed is not None and key not in allowed:
            raise InvalidPlan(f"{name}.{_plain(key)}: unknown key; allowed: {', '.join(allowed)}")
    return value


def _plain(key: str) -> str:
    return key if key.isprintable() else _show(key)


def override_of(pattern: str, value: object) -> str | Placement:
    """A strategy's name as it is; a table of params, grads, optim, reshard_after_forward as a placement."""
    if not isinstance(value, dict):
        return value  # type: ignore[return-value]  # Plan says what else is wrong with it
    key = f"overrides.{_plain(pattern)}"
    states = ("params", "grads", "optim")
    table = table_of(key, value, allowed=(*states, "reshard_after_forward"))
    where = {where.value: where for where in Where}
    for state in states:
        if state not in table:
            raise InvalidPlan(f"{key}.{state} is missing: must be one of {', '.join(where)}")
        if not isinstance(table[state], str) or table[state] not in where:
            raise InvalidPlan(not_among(f"{key}.{state}", table[state], where))
    try:
        return Placement(
            **{state: where[table[state]] for state in states},
            reshard_after_forward=table.get("reshard_after_forward", False),
        )
    except InvalidPlan as error:
        raise InvalidPlan(f"{key}: {error}") from error
