"""Tests the reach of an optimizer's update: the elements that the update of one element reads.

Copies of the optimizer step small tensors:

    whole     one copy steps a tensor of more than 16,384 elements
    together  one copy steps that tensor and another one
    pieces    one copy per piece of the tensor, like ranks that hold slices
    even      pieces of a tensor of 2^14 elements: torchao's optimizers quantise the states of full blocks only

10 steps, with gradients of ordinary, tiny and huge size; parameters, states and options are compared bit by bit.
No difference is allowed: each element of an elementwise update is rounded by itself. In a CPU's kernels only the last
elements of a tensor, which do not fill a vector, run other code; pieces begin at vector boundaries, and the tensor is
small enough for one thread, so those are the same elements. A GPU's kernels run the same code for every element.

A copy resembles an optimizer after `prepare`: the same object with other parameters in its groups. The optimizer
itself, its state and the random generators do not change.
"""

import copy
import itertools
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.base.vocabulary.layout import ALIGNMENT
from shardwise.engine.core.parameters import parameter_like

NUM_STEPS = 10
# Sizes that are no multiple of a vector's length; the last shape is for three and more dimensions.
_SHAPES = ((16_637,), (131, 127), (37, 10, 5, 9))
# Factors of the gradients, step by step; 0: large and small parts in one gradient.
_SCALES = (1.0, 1.0, 1.0, 1.0, 1e-10, 1e-10, 0.0, 0.0, 1e10, 1e10)
_EVEN_SHAPES = ((16_384,), (128, 128), (32, 16, 8, 4))
_LARGEST_ALIGNMENT = 4096
# Integer dtypes by size, to compare bits.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# A scheduler may begin at 0, which would not move any parameter.
_LEAST_LR = 1e-3


class Reach(Enum):
    """The update of one element depends on that element, on its tensor, or on other tensors too."""

    ELEMENT = "element"
    TENSOR = "tensor"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a test.

    alignment   a tensor may be cut at multiples of this, for ELEMENT: larger than ours for an optimizer with blocks
    why         the error of an optimizer that could not be tested; "" otherwise
    """

    reach: Reach
    alignment: int = ALIGNMENT
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The tensors of a copy after each step, their states, and the options of their group."""

    values: list[list[Tensor]]
    states: list[dict[str, Any]]
    options: dict[str, Any]


def probe(
    optimizer: Optimizer,
    *,
    group: int,
    num_dims: int,
    dtype: torch.dtype,
    device: torch.device,
    like: nn.Parameter | None = None,
) -> Verdict:
    """Test the reach of the update of parameters of this group with this number of dimensions.

    `like`: a parameter whose class and attributes they have.
    """
    shape, even_shape = (_shape(shapes, num_dims) for shapes in (_SHAPES, _EVEN_SHAPES))
    tensor, grads = _drawn(shape, seed=1, dtype=dtype, device=device)
    other, other_grads = _drawn((*shape[:-1], shape[-1] + 2), seed=2, dtype=dtype, device=device)
    run = partial(_run, optimizer, group=group, like=like)
    with _untouched(device):
        try:
            whole = run([tensor], [grads])
            moved = not _same(whole.values[-1][0], tensor)
            together = run([tensor, other], [grads, other_grads])
            alone = run([other], [other_grads])
        # A user's code, in a situation that it was not written for, may raise any error.
        except Exception as error:
            return Verdict(reach=Reach.MODEL, why=f"{type(error).__name__}: {error}".splitlines()[0])
        if not moved:
            return Verdict(reach=Reach.MODEL, why="it does not step the parameters in its param_groups")
        if not _is_pair(together, whole, alone):
            return Verdict(reach=Reach.MODEL)
        alignment = ALIGNMENT
        while not _cuts_alike(run, tensor, grads, whole=whole, alignment=alignment):
            alignment *= 2
            if alignment > _LARGEST_ALIGNMENT:
                return Verdict(reach=Reach.TENSOR)
        even, grads = _drawn(even_shape, seed=3, dtype=dtype, device=device)
        whole = run([even], [grads])
        for state in whole.states[0].values():
            if isinstance(state, Tensor) and type(state) not in (Tensor, nn.Parameter):
                why = f"its states are {type(state).__name__}, a class of tensors that ranks can neither cut nor send"
                return Verdict(reach=Reach.MODEL, why=why)
        cuts = _cuts_alike(run, even, grads, whole=whole, alignment=alignment)
    return Verdict(reach=Reach.ELEMENT, alignment=alignment) if cuts else Verdict(reach=Reach.TENSOR)


def _shape(shapes: Sequence[tuple[int, ...]], num_dims: int) -> tuple[int, ...]:
    shape = shapes[min(max(num_dims, 1), len(shapes)) - 1]
    return shape + (1,) * (num_dims - len(shape))


def _drawn(
    shape: tuple[int, ...], *, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Draw a tensor and its gradients: noise around a constant direction, as in training."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator)

    tensor, direction = draw() * 1e-2, draw()
    uneven = torch.logspace(-6, 6, direction.numel()).reshape(shape)
    grads = [(direction + draw()) * (scale or uneven) for scale in _SCALES]
    return tensor.to(device, dtype), [grad.to(device, dtype) for grad in grads]


def _cuts_alike(
    run: Callable[..., _Outcome], tensor: Tensor, grads: Sequence[Tensor], *, whole: _Outcome, alignment: int
) -> bool:
    """Return whether pieces that begin at multiples of `alignment`, each with its own copy, give the same bits."""
    size = tensor.numel()
    last = size // alignment * alignment
    cuts = [0, alignment, size // 2 // alignment * alignment, last, size]
    for start, stop in itertools.pairwise(dict.fromkeys(cuts)):

        def piece(value: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return value.reshape(-1)[start:stop].clone()

        try:
            found = run([piece(tensor)], [[piece(grad) for grad in grads]])
        except Exception:  # It takes whole tensors only (a matrix, say).
            return False
        expected = [piece(values[0]) for values in whole.values]
        if not all(_same(values[0], value) for values, value in zip(found.values, expected, strict=True)):
            return False
        if not _same(found.options, whole.options):
            return False
        (state,) = found.states
        if not _is_piece(state, whole.states[0], start=start, stop=stop, size=size, alignment=alignment):
            return False
    return True


def _is_piece(
    piece: Mapping[str, Any], whole: Mapping[str, Any], *, start: int, stop: int, size: int, alignment: int
) -> bool:
    """Return whether the states of a piece equal the cut states of the whole tensor: per element, or per block."""
    if piece.keys() != whole.keys():
        return False
    for key, value in whole.items():
        if isinstance(value, Tensor) and value.numel() == size:
            value = value.reshape(-1)[start:stop]
        elif isinstance(value, Tensor) and value.numel() == -(-size // alignment):
            value = value.reshape(-1)[start // alignment : -(-stop // alignment)]
        is_flat = isinstance(value, Tensor) and value.dim() == 1
        if not _same(piece[key].reshape(-1) if is_flat else piece[key], value):
            return False
    return True


def _is_pair(both: _Outcome, one: _Outcome, other: _Outcome) -> bool:
    """Return whether two tensors that were stepped together equal those that were stepped alone."""
    return (
        all(
            _same(values[0], ours[0]) and _same(values[1], theirs[0])
            for values, ours, theirs in zip(both.values, one.values, other.values, strict=True)
        )
        and _same(both.states, [*one.states, *other.states])
        and _same(both.options, one.options)
        and _same(both.options, other.options)
    )


def _same(one: Any, other: Any) -> bool:
    """Compare bit by bit, so that NaN equals itself; other objects than numbers and tensors are equal by type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        integers = _INTEGERS.get(one.element_size(), torch.uint8)
        bits = [value.detach().contiguous().reshape(-1).view(integers) for value in (one, other)]
        return torch.equal(*bits)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and one != one:
        return bool(other != other)
    return bool(one == other) if is_plain(one) else True


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype)


def _run(
    optimizer: Optimizer,
    tensors: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    group: int,
    like: nn.Parameter | None,
) -> _Outcome:
    """Let a copy of the optimizer step these tensors in its group, by one gradient of each per step."""
    parameters = [_parameter(tensor.clone(), like=like) for tensor in tensors]
    twin = _copy(optimizer, group=group, parameters=parameters)
    if callable(getattr(twin, "train", None)):
        twin.train()  # type: ignore[attr-defined]  # A schedule-free optimizer does not step before.
    step = type(twin).step
    if getattr(step, "hooked", False):
        # Skips the hooks that are registered for every optimizer's steps.
        step = step.__wrapped__  # type: ignore[attr-defined]
    values = []
    for number in range(NUM_STEPS):
        for parameter, of_steps in zip(parameters, grads, strict=True):
            parameter.grad = of_steps[number].clone()
        step(twin)
        values.append([parameter.detach().clone() for parameter in parameters])
    return _Outcome(
        values=values,
        states=[dict(twin.state.get(parameter, {})) for parameter in parameters],
        options={key: value for key, value in twin.param_groups[group].items() if key != "params"},
    )


def _parameter(values: Tensor, *, like: nn.Parameter | None) -> nn.Parameter:
    if like is None:
        return nn.Parameter(values)
    made = parameter_like(like, values)
    made.requires_grad_()
    # What the trial sets on it does not stay on the model's.
    made.__dict__ = dict(vars(like))
    return made


def _copy(optimizer: Optimizer, *, group: int, parameters: list[nn.Parameter]) -> Optimizer:
    """Copy the optimizer without its state, with only these parameters; references to others become empty ones."""
    twin: Optimizer = object.__new__(type(optimizer))
    groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.param_groups): groups, id(optimizer.state): state}
    for made, original in zip(groups, optimizer.param_groups, strict=True):
        memo[id(original)] = made
        memo |= {id(parameter): nn.Parameter(torch.empty(0)) for parameter in original["params"]}
    for number, (made, original) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        # One name per parameter.
        made.update({k: copy.deepcopy(v, memo) for k, v in original.items() if k not in ("params", "param_names")})
        made["params"] = parameters if number == group else []
        _raise_lr(made)
    twin.__dict__ |= {name: OrderedDict() for name in vars(optimizer) if _is_hooks(name)}
    twin.__dict__ |= {name: copy.deepcopy(value, memo) for name, value in own_attributes(optimizer).items()}
    twin.param_groups, twin.state = groups, state
    return twin


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer other than its groups and state.

    Without hooks, and without attributes that replace a method of its class (a scheduler's step, our zero_grad).
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state")
        and not _is_hooks(name)
        and not callable(getattr(type(optimizer), name, None))
    }


def _is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _raise_lr(options: dict[str, Any]) -> None:
    lr = options.get("lr")
    if isinstance(lr, Tensor):
        options["lr"] = lr.detach().clamp(min=_LEAST_LR)
    elif isinstance(lr, int | float):
        options["lr"] = max(lr, _LEAST_LR)


@contextmanager
def _untouched(device: torch.device) -> Iterator[None]:
    """Restore the random generators afterwards, silence warnings of copies, and run compiled code as ordinary code.

    On a CPU without bf16, torch stops using oneDNN at its first product in bf16 (Muon's): fp32 would have other bits.
    """
    onednn = torch.backends.mkldnn.enabled
    devices = [device] if device.type == "cuda" else []
    drawn = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_drawn = numpy.random.get_state() if numpy is not None else None
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if torch.backends.mkldnn.enabled != onednn:
                torch.backends.mkldnn.enabled = onednn
            random.setstate(drawn)
            if numpy is not None:
                numpy.random.set_state(numpy_drawn)
