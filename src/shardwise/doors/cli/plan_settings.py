"""What the planner page may ask for: options of `shardwise plan`, as text, each checked.

No option that names a file or that traces another model is among them, but for the folder of an hf: model: its
config.json is read, and nothing is run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.doors.cli.plan_options import PlanOptions


def _text(value: str) -> str:
    if not re.fullmatch(r"[\w.,:=*+@ -]{1,100}", value, re.ASCII):
        raise ValueError
    return value


def _model(value: str) -> str:
    return value if re.fullmatch(r"hf:[^\x00-\x1f]{1,1000}", value) else _text(value)


def _whole(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value, re.ASCII):
        raise ValueError
    return int(value)


def _money(value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,4})?", value, re.ASCII):
        raise ValueError
    return float(value)


_TEXTS = (
    *("cluster", "strategy", "precision", "recompute", "update", "mesh", "across", "reduce_dtype", "budget"),
    *("host_memory", "offload", "optimizer", "goal", "tokens", "capture", "overlap"),
)
SETTINGS: Mapping[str, Callable[[str], object]] = {
    "model": _model,
    **dict.fromkeys(_TEXTS, _text),
    **dict.fromkeys(("micro_batch", "seq", "global_batch", "accumulate"), _whole),
    "price": _money,
    "accumulate_reduced": lambda value: value == "1",
}


_DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in PlanOptions.__dataclass_fields__.items() if name not in ("model", "cluster")
}


def asked_options(asked: Mapping[str, str], *, base: PlanOptions) -> PlanOptions:
    """Return `base` with the settings of a query; an empty one is the default of its option."""
    given: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in SETTINGS:
            raise UnknownName.of("setting", name[:40], known=SETTINGS)
        try:
            given[name] = SETTINGS[name](value) if value else _DEFAULTS[name]
        except (KeyError, ValueError) as error:
            raise InvalidPlan(f"{name} = {value[:100]!r}: this is no {name} that the page can ask for") from error
    return replace(base, **given)


def as_settings(options: PlanOptions) -> dict[str, str]:
    """Return the settings that give these options; defaults are left out."""
    values = {name: getattr(options, name) for name in SETTINGS}
    return {
        name: "1" if value is True else str(value)
        for name, value in values.items()
        if value is not None and value is not False and value != _DEFAULTS.get(name)
    }
