"""Decides which optimizers can step slices, and describes optimizers so that ranks can compare theirs."""

import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.vocabulary.layout import ALIGNMENT
from shardwise.engine.optimizer.reach import Reach, Verdict, is_plain, own_attributes, probe

# With any options, each element's update depends on that element's gradient and state alone, so a slice can be updated
# by itself. By exact class: a subclass, or another package's class of the same name, may do something else.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class StaleOptimizer(ShardwiseError):  # noqa: N818
    """An optimizer whose state belongs to parameters that no longer exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Whether a parameter is stepped in slices, and in which dtype."""

    sharded: bool
    dtype: torch.dtype


def check_optimizer(optimizer: Optimizer, *, stepped: Mapping[int, Stepped]) -> None:
    """Refuse an optimizer of other parameters than the model's (`stepped`, by id), or one that has stepped before.

    And one that cannot step the gradients that it will get.
    """
    check_parameters(optimizer, known=stepped)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise InvalidPlan(
            f"{name_of(optimizer)} was made without torch.optim.Optimizer.__init__: if it is around another optimizer "
            "(Lookahead), give the inner one to shardwise.prepare; docs/engine.md shows how"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidPlan(
            "SparseAdam steps sparse gradients, and ranks add up dense ones: use Adam or SGD for these parameters"
        )
    for state in optimizer.state.values():
        if not _is_first(state):
            raise StaleOptimizer(
                f"{name_of(optimizer)} has stepped before, or keeps {', '.join(map(str, state))} of parameters from "
                "its making: hand a fresh one to shardwise.prepare, then load the old state with its load_state_dict; "
                "of an optimizer around another one (Lookahead), prepare the inner one before it is wrapped"
            )
        if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
            raise InvalidPlan(
                f"{name_of(optimizer)} made its state when it was made, on the meta device, where it has no values: "
                "make it after shardwise.prepare"
            )


def check_parameters(optimizer: Optimizer, *, known: Container[int]) -> None:
    """Refuse an optimizer of other parameters than the model's (`known`, by id)."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in known:
            raise InvalidPlan(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's: "
                "give it an optimizer of its own"
            )


def _is_first(state: Any) -> bool:
    """Return whether a parameter's state is from before the first step: Adagrad allocates it at once."""
    return isinstance(state, dict) and "step" in state and float(state["step"]) == 0


def judge(
    optimizer: Optimizer, *, stepped: Mapping[int, Stepped], device: torch.device, first_group: int = 0
) -> dict[int, Verdict]:
    """Return the reach of the update of each parameter that is stepped in slices, by its id."""
    found: dict[int, Verdict] = {}
    tried: dict[tuple[int, int, torch.dtype, str], Verdict] = {}
    for number, group in list(enumerate(optimizer.param_groups))[first_group:]:
        for parameter in group["params"]:
            how = stepped[id(parameter)]
            if not how.sharded:
                continue
            # A parameter without dimensions is stepped as one element.
            kind = (number, max(parameter.dim(), 1), how.dtype, _attributes(parameter))
            if kind not in tried:
                tried[kind] = _verdict(optimizer, *kind, like=parameter, device=device)
            found[id(parameter)] = tried[kind]
    return found


def _attributes(parameter: nn.Parameter) -> str:
    """Return what an update may depend on besides the parameter's group: its class, and what was set on it."""
    held = ((name, value if is_plain(value) else type(value)) for name, value in vars(parameter).items())
    return f"{type(parameter)} {sorted(held, key=itemgetter(0))}"


def slice_alignment(verdicts: Mapping[Any, Verdict]) -> int:
    """Return the alignment of slices in which all parameters with elementwise updates can be stepped."""
    found = (verdict.alignment for verdict in verdicts.values() if verdict.reach is Reach.ELEMENT)
    return max(found, default=ALIGNMENT)


def needs_owner(verdict: Verdict, *, alignment: int) -> bool:
    """Return whether a parameter must be stepped unsharded if slices begin at multiples of `alignment`."""
    return verdict.reach is not Reach.ELEMENT or verdict.alignment > alignment


def check_reach(optimizer: Optimizer, *, verdicts: Mapping[int, Verdict]) -> None:
    """Refuse an optimizer whose update of one tensor reads others: no rank holds all of them unsharded."""
    for verdict in verdicts.values():
        if verdict.reach is not Reach.MODEL:
            continue
        if verdict.why:
            raise InvalidPlan(
                f"{name_of(optimizer)} could not be tried on a small tensor ({verdict.why}), and under this plan ranks "
                "hold slices: use strategy = 'ddp', or say prepare(…, any_optimizer=True) if it updates each element "
                "by itself; of one around another (SAM, Lookahead) prepare the inner one, as docs/engine.md shows"
            )
        raise InvalidPlan(
            f"{name_of(optimizer)} looks at all parameters together in its update (tried on small tensors, together "
            "and alone), and under this plan ranks hold slices: use strategy = 'ddp', or an optimizer that updates "
            "each parameter by itself"
        )


def warn_owned(optimizer: Optimizer, *, num_owned: int, num_held: int) -> None:
    """Warn that parameters move to the ranks that own them, unless the optimizer's class announces it."""
    if getattr(optimizer, "takes_whole_matrices", False):
        return
    warnings.warn(
        f"{name_of(optimizer)} looks at whole parameters in its update (tried on a small tensor, whole and cut): "
        f"{num_owned} of its {num_held} parameters are OWNED, each stepped whole by one rank, to which its slices move "
        "before an update and back after it",
        stacklevel=5,
    )


def name_of(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


# Results of trials, by all that a trial depends on.
_FOUND: dict[tuple[Any, ...], Verdict] = {}


def _verdict(
    optimizer: Optimizer,
    group: int,
    num_dims: int,
    dtype: torch.dtype,
    attributes: str,
    *,
    like: nn.Parameter,
    device: torch.device,
) -> Verdict:
    if type(optimizer) in ELEMENTWISE:
        return Verdict(reach=Reach.ELEMENT)
    options = _options(optimizer)
    key = (type(optimizer), group, num_dims, dtype, attributes, device.type, options)
    if key not in _FOUND or not options:
        _FOUND[key] = probe(optimizer, group=group, num_dims=num_dims, dtype=dtype, like=like, device=device)
    return _FOUND[key]


def _options(optimizer: Optimizer) -> str:
    """Return all options that an update may depend on as text; "" if text cannot describe one of them."""
    options = [
        (key, value)
        for namespace in (own_attributes(optimizer), *optimizer.param_groups)
        for key, value in namespace.items()
        if key not in ("params", "param_names")
    ]
    return str([(key, _shown(value)) for key, value in options]) if all(_is_shown(v) for _, v in options) else ""


def _is_shown(value: Any) -> bool:
    """Return whether `_shown` describes a value completely."""
    if isinstance(value, dict):
        return all(map(_is_shown, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_shown, value))
    return is_plain(value) or (isinstance(value, Tensor) and value.numel() <= 1)


def describe_optimizer(optimizer: Optimizer, *, names: Mapping[int, str]) -> str:
    """Describe an optimizer, one line per property that must be equal on all ranks; `names`: parameters by id."""
    lines = [f"optimizer = {name_of(optimizer)}"]
    for number, group in enumerate(optimizer.param_groups):
        lines += [
            f"optimizer.param_groups[{number}] {option} = {_shown(value)}"
            for option, value in group.items()
            if option != "params"
        ]
        lines += [f"optimizer.param_groups[{number}] holds {names[id(p)]}" for p in group["params"]]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return a value as text that is the same in all processes."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, tuple | list):
        return str([_shown(inner) for inner in value])
    if isinstance(value, dict):
        return str({key: _shown(inner) for key, inner in value.items()})
    return str(value) if is_plain(value) else f"{type(value).__module__}.{type(value).__qualname__}"
