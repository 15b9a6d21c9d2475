"""The private names of torch: each is in the installed torch in the form that is used; one that is not is one line."""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import TorchChanged
from shardwise.torch_internals import torch_private
from shardwise.torch_internals.private_names import PRIVATE, Private
from shardwise.vocabulary.tested_versions import TESTED_TORCH, installed_torch


def is_here(private: Private) -> bool:
    """Names with _cuda_ are those of a CUDA build."""
    return ":_cuda_" not in private.path or torch.backends.cuda.is_built()


@pytest.mark.parametrize("name", [name for name, private in PRIVATE.items() if is_here(private)])
def test_every_private_name_is_in_the_installed_torch_in_the_form_that_is_used(name: str) -> None:
    value = getattr(torch_private, name)
    assert not isinstance(value, property)
    assert getattr(torch_private, name) is vars(torch_private)[name]


def test_what_a_row_has_is_an_attribute_of_torch() -> None:
    assert torch_private.current_graph_task_id is torch._C._current_graph_task_id
    assert torch_private.BatchNorm is torch.nn.modules.batchnorm._BatchNorm
    assert torch_private.backend_timeout is torch._C._distributed_c10d.Backend.Options.__dict__["_timeout"].fget


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(inspect.getfile(torch_private)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed: dict[str, str] = {}
    for node in block.body:
        if isinstance(node, ast.Assign):
            typed[ast.unparse(node.targets[0])] = ast.unparse(node.value)
        elif isinstance(node, ast.AnnAssign):
            typed[ast.unparse(node.target)] = ast.unparse(node.value) if node.value else ""
    assert list(typed) == list(PRIVATE)
    for name, value in typed.items():
        lasts = [
            path.replace(":", ".").rpartition(".")[2] for path in (PRIVATE[name].path, PRIVATE[name].former) if path
        ]
        assert value.rpartition(".")[2] in ("", *lasts), name


def torch_without(monkeypatch: pytest.MonkeyPatch, private: Private) -> str:
    """The line for a row, looked up for the first time."""
    monkeypatch.setitem(PRIVATE, "tried", private)
    with pytest.raises(TorchChanged) as raised:
        torch_private.tried  # noqa: B018
    assert "tried" not in vars(torch_private)
    return str(raised.value)


@pytest.mark.parametrize(
    "path", ["torch._C:_gone", "torch._gone:name", "torch:Tensor._gone", "torch.autograd:Variable._gone.queue_callback"]
)
def test_a_name_that_is_gone_is_one_line_with_version_use_and_way_out(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = torch_without(monkeypatch, Private(path, "measures a test"))
    what, _, rest = line.partition(" is not there (")
    assert what == f"torch {installed_torch()}: {path.replace(':', '.')}, with which Shardwise measures a test,"
    assert "_gone'" in rest
    assert line.endswith(f"tested with torch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}: install torch {TESTED_TORCH[-1]}")
    assert "\n" not in line


def takes(first: int, second: int, *, third: int = 0) -> None:
    pass


@pytest.mark.parametrize(
    ("given", "named", "why"),
    [
        (1, "", "missing a required argument: 'second'"),
        (3, "", "too many positional arguments"),
        (2, "third fourth", "got an unexpected keyword argument 'fourth'"),
    ],
)
def test_a_changed_signature_is_one_line_that_says_what_does_not_fit(
    given: int, named: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_tried", takes, raising=False)
    line = torch_without(monkeypatch, Private("torch:_tried", "measures a test", given=given, named=named))
    assert f"torch._tried, with which Shardwise measures a test, takes other arguments ({why}); " in line


def test_an_object_without_an_attribute_that_is_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_tried", SimpleNamespace(left=1), raising=False)
    line = torch_without(monkeypatch, Private("torch:_tried", "measures a test", has="left right"))
    assert "measures a test, has no right; " in line


def test_a_signature_that_takes_the_call_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_tried", takes, raising=False)
    monkeypatch.setitem(PRIVATE, "tried", Private("torch:_tried", "measures a test", given=2, named="third"))
    assert torch_private.tried is takes
    monkeypatch.delitem(vars(torch_private), "tried")


def test_an_older_torch_has_the_name_at_its_former_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_before", takes, raising=False)
    monkeypatch.setitem(PRIVATE, "tried", Private("torch:_now", "measures a test", former="torch:_before"))
    assert torch_private.tried is takes
    monkeypatch.delitem(vars(torch_private), "tried")


def test_a_name_outside_of_the_table_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'curent_graph_task_id'"):
        torch_private.curent_graph_task_id  # type: ignore[attr-defined]  # noqa: B018


def test_what_is_put_in_torchs_place_is_there_until_it_is_put_back() -> None:
    own = torch.autograd.profiler.profile._parse_kineto_results
    before = torch_private.replace("parse_kineto_results", takes)
    try:
        assert torch.autograd.profiler.profile._parse_kineto_results is takes
        # Users of the name still get torch's.
        assert torch_private.parse_kineto_results is before is own
    finally:
        torch_private.replace("parse_kineto_results", before)
    assert torch.autograd.profiler.profile._parse_kineto_results is own
