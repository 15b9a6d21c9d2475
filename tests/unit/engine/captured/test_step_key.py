"""What makes another step of a step: everything but the values of its tensors."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.captured.step_key import StepKey, flatten_inputs, optimizer_key, step_key
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.graphs.python_state import PythonState, foreign_hook
from shardwise.engine.graphs.reads import NotCaptured

CPU = torch.device("cpu")


def key(*inputs: Any, model: nn.Module | None = None, passes: PassState | None = None) -> StepKey:
    model = model or MODEL
    return step_key(
        flatten_inputs(inputs),
        device=CPU,
        parameters=list(model.parameters()),
        passes=passes or PassState(),
        state=PythonState(model),
    )


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))


def test_values_of_tensors_do_not_matter() -> None:
    assert key({"ids": torch.zeros(2, 3), "weights": (0.5, 1)}) == key({"ids": torch.ones(2, 3), "weights": (0.5, 1)})


def test_the_order_of_a_dicts_keys_matters() -> None:
    ids, labels = torch.zeros(2, 3), torch.ones(2, 3)
    assert key({"input_ids": ids, "labels": labels}) != key({"labels": labels, "input_ids": ids})


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 3), 0.5, "x"),
        (torch.zeros(3, 2).t(), 1, "x"),
        (torch.zeros(2, 3, dtype=torch.float64), 1, "x"),
        (torch.zeros(2, 4), 1, "x"),
        (torch.zeros(2, 3), True, "x"),
        (torch.zeros(2, 3), 1.0, "x"),
        (torch.zeros(2, 3), 1, "y"),
        ([torch.zeros(2, 3)], 1, "x"),
        (torch.zeros(2, 3), 1),
    ],
)
def test_shapes_strides_dtypes_plain_values_and_the_tree_do(other: tuple[Any, ...]) -> None:
    assert key(torch.zeros(2, 3), 1, "x") != key(*other)


def test_modes_trained_parameters_attributes_and_passes_do() -> None:
    x = torch.zeros(2, 4)
    plain = key(x)
    with torch.no_grad():
        assert key(x) != plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key(x) != plain
    MODEL.eval()
    assert key(x) != plain
    MODEL.train()
    MODEL[1].p = 0.2
    assert key(x) != plain
    MODEL[1].p = 0.1
    MODEL[0].bias.requires_grad_(False)
    assert key(x) != plain
    MODEL[0].bias.requires_grad_(True)
    kept = MODEL[2].running_mean
    MODEL[2].running_mean = torch.zeros(4)
    assert key(x) != plain
    MODEL[2].running_mean = kept
    assert key(x, passes=PassState(num_counting=1)) != plain
    assert key(x) == plain


def test_what_a_graph_cannot_be_given_is_refused() -> None:
    with pytest.raises(NotCaptured, match="the step is given a object"):
        key(object())
    with pytest.raises(NotCaptured, match="a tensor on meta: move batches to cpu"):
        key(torch.zeros(2, device="meta"))
    with pytest.raises(NotCaptured, match="requires a gradient"):
        key(torch.zeros(2, requires_grad=True))


def test_options_and_loaded_states_of_an_optimizer_do_its_rate_as_a_tensor_does_not() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), capturable=False)
    parameter.grad = torch.ones(3)
    optimizer.step()
    plain = optimizer_key(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    assert optimizer_key(optimizer) == plain
    optimizer.param_groups[0]["eps"] = 1e-3
    assert optimizer_key(optimizer) != plain
    optimizer.param_groups[0]["eps"] = 1e-8
    kept = optimizer.state[parameter]["exp_avg"]
    optimizer.state[parameter]["exp_avg"] = kept.clone()
    assert optimizer_key(optimizer) != plain


def test_hooks_of_others_are_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert foreign_hook(model) == ""
    handle = model[0].register_forward_hook(lambda *_: None)
    assert foreign_hook(model) == "model.0"
    handle.remove()
    assert foreign_hook(model) == ""
