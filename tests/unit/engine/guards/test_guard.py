"""A parameter at rest answers what it can and refuses what it cannot, in one line."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.core.parameters import unguarded
from shardwise.engine.guards.guard import Resting, ShardedParameter, refuse, rest, wake


def resting(*, dropped: list[bool] | None = None) -> nn.Parameter:
    """A parameter at rest that refuses every read."""
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter._touched = lambda is_grad: refuse("blocks.0.weight", is_grad=is_grad)  # type: ignore[attr-defined]
    parameter._drop_grad = lambda: dropped.append(True) if dropped is not None else None  # type: ignore[attr-defined]
    rest([parameter])
    return parameter


READS: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "add": lambda p: p + 1,
    "add from the right": lambda p: torch.ones(3, 2) + p,
    "index": lambda p: p[0],
    "item": lambda p: p.sum().item(),
    "tolist": lambda p: p.tolist(),
    "norm": lambda p: p.norm(),
    "function": lambda p: torch.linalg.vector_norm(p),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "numpy": lambda p: p.numpy(),
    "iterate": lambda p: list(p),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 2), p),
    "write": lambda p: p.copy_(torch.ones(3, 2)),
    "pointer": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "compare": lambda p: p == 1,
    "keyword": lambda p: torch.add(torch.ones(3, 2), other=p),
    "in a list": lambda p: torch.stack([p, p]),
    "in a list of a foreach": lambda p: torch._foreach_norm([p]),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_its_data_is_refused_in_one_line(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ShardedParameter, match=r"blocks\.0\.weight is sharded and freed: .*full_state_dict") as refused:
        read(resting())
    assert "\n" not in str(refused.value)


def test_a_state_dict_of_a_module_has_its_names_and_refuses_reads_of_its_values() -> None:
    module = nn.Linear(2, 3, bias=False)
    module.weight = resting()
    (name, value), *others = module.state_dict().items()
    assert (name, value.shape, value.requires_grad, others) == ("weight", (3, 2), False, [])
    for read in READS.values():
        with pytest.raises(ShardedParameter, match=r"blocks\.0\.weight is sharded and freed: .*full_state_dict"):
            read(value)
    with pytest.raises(ShardedParameter, match=r"blocks\.0\.weight"):
        torch.save(module.state_dict(), io.BytesIO())


ANSWERS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "shape": (lambda p: p.shape, torch.Size([3, 2])),
    "size": (lambda p: p.size(0), 3),
    "dtype": (lambda p: p.dtype, torch.float32),
    "device": (lambda p: p.device, torch.device("cpu")),
    "dim": (lambda p: p.dim(), 2),
    "ndim": (lambda p: p.ndim, 2),
    "numel": (lambda p: p.numel(), 6),
    "nbytes": (lambda p: p.nbytes, 24),
    "element_size": (lambda p: p.element_size(), 4),
    "len": (len, 3),
    "requires_grad": (lambda p: p.requires_grad, True),
    "is_leaf": (lambda p: p.is_leaf, True),
    "is_floating_point": (lambda p: p.is_floating_point(), True),
    "is_contiguous": (lambda p: p.is_contiguous(), True),
    "stride": (lambda p: p.stride(), (2, 1)),
    "repr": (repr, "Resting((3, 2), torch.float32)"),
    "isinstance": (lambda p: isinstance(p, nn.Parameter), True),
}


@pytest.mark.parametrize(("ask", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_what_does_not_need_the_data_is_answered(ask: Callable[[Tensor], Any], answer: Any) -> None:
    assert ask(resting()) == answer


def test_it_can_be_a_key_and_be_frozen_and_thawed_and_get_hooks() -> None:
    parameter = resting()
    assert {parameter: 1}[parameter] == 1
    parameter.requires_grad_(False)
    assert not parameter.requires_grad
    parameter.requires_grad = True
    assert parameter.requires_grad
    parameter.register_hook(lambda grad: grad).remove()
    parameter.register_post_accumulate_grad_hook(lambda p: None).remove()


def test_a_module_counts_lists_and_groups_its_parameters_at_rest() -> None:
    linear = nn.Linear(2, 3)
    for parameter in linear.parameters():
        parameter._touched = lambda is_grad: refuse("weight", is_grad=is_grad)  # type: ignore[attr-defined]
    rest(linear.parameters())
    assert sum(p.numel() for p in linear.parameters()) == 9
    assert [name for name, p in linear.named_parameters() if p.dim() >= 2] == ["weight"]


def test_a_gradient_that_is_sharded_is_refused_in_one_line() -> None:
    with pytest.raises(ShardedParameter, match=r"gradient of blocks\.0\.weight is sharded.*clip_grad_norm_") as refused:
        resting().grad  # noqa: B018
    assert "\n" not in str(refused.value)


def test_clearing_its_gradient_drops_the_owned_one_and_writing_one_is_refused() -> None:
    dropped: list[bool] = []
    parameter = resting(dropped=dropped)
    parameter.grad = None
    assert dropped == [True]
    with pytest.raises(ShardedParameter):
        parameter.grad = torch.ones(3, 2)


def test_a_read_that_is_allowed_sees_the_parameter_as_it_is() -> None:
    parameter = resting()
    touched: list[bool] = []
    parameter._touched = touched.append  # type: ignore[attr-defined]
    assert parameter.sum().item() == 6
    assert parameter.grad is None
    assert touched == [False, True]


def test_what_is_computed_from_it_is_an_ordinary_tensor() -> None:
    parameter = resting()
    parameter._touched = lambda is_grad: None  # type: ignore[attr-defined]
    assert type(parameter + 1) is Tensor


def test_unguarded_it_can_be_handled() -> None:
    parameter = resting()
    with unguarded():
        parameter.grad = torch.ones(3, 2)
        assert parameter.grad is not None
        parameter.grad = None
        assert parameter.sum().item() == 6


def test_wake_gives_the_same_parameter_back_as_a_plain_one() -> None:
    parameter = resting()
    assert type(parameter) is Resting
    wake([parameter])
    assert type(parameter) is nn.Parameter
    assert parameter.sum().item() == 6
    assert parameter.grad is None
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(3, 2))


@pytest.mark.parametrize("is_grad", [False, True])
def test_a_refusal_names_the_parameter_and_says_where_its_slices_are(is_grad: bool) -> None:
    with pytest.raises(ShardedParameter, match=r"head\.bias.*optimizer\.param_groups"):
        partial(refuse, "head.bias", is_grad=is_grad)()
