"""The private names of torch: each is in the installed torch in the form that is used; one that is not is one line."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import TorchChanged
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.private_names import PRIVATE, Private
from shardwise.base.vocabulary.tested_versions import TESTED_TORCH, installed_torch


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


SOURCE = Path(shardwise.__file__).parent

# What base/torch_internals/__init__.py says is left in the files that use it.
LEFT_IN_TORCH = re.compile(
    r"torch\._foreach_\w+|torch\._scaled_mm|torch\.ops\.aten\._\w+(\.\w+)?|torch\.utils\._pytree(\.\w+)?"
)
LEFT_ATTRIBUTES: dict[str, Callable[[], object]] = {
    **{name: lambda: torch.ones(1) for name in ("_version", "_base", "_is_view", "_post_accumulate_grad_hooks")},
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_sequence_nr": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_concrete_type": lambda: torch.jit.script(nn.Linear(1, 1)),
    **{
        name: lambda: nn.Linear(1, 1)
        for name in (
            "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks",
            "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_compiled_call_impl",
        )
    },
    "_optimizer_step_pre_hooks": lambda: torch.optim.SGD([torch.ones(1)]),
    "_init_group": lambda: torch.optim.AdamW([torch.ones(1)]),
}  # fmt: skip
# Not of torch: ours on functions and classes of others, a namedtuple's, and transformers'.
OF_OTHERS = {
    "_runs_inside_forward", "_replace", "_init_weights", "_is_distributed_loading_by_transformers",
}  # fmt: skip
# Where objects are those of other libraries, which have private names too.
ON_OTHERS = (
    "doors/integrations",
    "models/weights/pretrained.py",
    "measure/bench/peers.py",
    "measure/bench/megatron_peer.py",
)


@cache
def trees() -> dict[Path, ast.Module]:
    found = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    return {path: tree for path, tree in found.items() if path.parent.name != "torch_internals"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_names() -> set[str]:
    """The private names that this package defines: functions, classes, variables and attributes."""
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr for of in [node.value] if isinstance(of, ast.Name) and of.id in ("self", "cls")}
    return found


def imported(tree: ast.AST) -> dict[str, str]:
    """Name in the file → dotted name of what it was imported from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`torch.nn.Module._x` of an expression that begins with an import; "" of others."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def private_uses(tree: ast.AST) -> set[str]:
    """The strictly private names of torch that a file uses: imported, in a chain, of an object, or by a string."""
    names = imported(tree)
    found = {full for full in names.values() if full.startswith("torch.")}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    attributes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            full = dotted(node, names)
            if full:
                found.add(full)
            else:
                attributes.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            attributes |= {word.value for word in node.args[1:2] if isinstance(word, ast.Constant)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    parts = {full: set(filter(is_private, full.split("."))) for full in found if full.startswith("torch.")}
    in_torch = {full for full, private in parts.items() if private - OF_OTHERS}
    # The shortest chain says it.
    in_torch = {full for full in in_torch if full.rpartition(".")[0] not in in_torch}
    known = own_names() | OF_OTHERS | LEFT_ATTRIBUTES.keys()
    return {full for full in in_torch if not LEFT_IN_TORCH.fullmatch(full)} | {
        f".{name}" for name in attributes if is_private(name) and name not in known
    }


def test_no_other_file_uses_a_private_name_of_torch_outside_of_the_families_that_are_left() -> None:
    found = {str(path.relative_to(SOURCE)): private_uses(tree) for path, tree in trees().items()}
    for path in (path for path in found if path.startswith(ON_OTHERS)):
        found[path] = {name for name in found[path] if not name.startswith(".")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._x()", "torch._C"),
        ("import torch._dynamo", "torch._dynamo"),
        ("def f():\n    from torch._inductor import lowering", "torch._inductor.lowering"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "torch.nn.modules.batchnorm._BatchNorm"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", "torch.distributed.distributed_c10d._world"),
        ("from torch import Tensor\nTensor._make_subclass", "torch.Tensor._make_subclass"),
        ("from importlib import import_module\nimport_module('torch._inductor')", "torch._inductor"),
        ("def f(group):\n    return group._get_backend()", "._get_backend"),
        ("def f(group):\n    return getattr(group, '_get_backend', None)", "._get_backend"),
        ("class A(Optimizer):\n    def f(self):\n        return self._patch_step_function", "._patch_step_function"),
        ("def f(profiler):\n    profiler._parse_kineto_results = None", "._parse_kineto_results"),
    ],
)
def test_a_private_name_is_found_however_it_is_written(source: str, name: str) -> None:
    assert name in private_uses(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_add_([], [])\ntorch.ops.aten._to_copy.default",
        "from torch.utils._pytree import tree_map",
        "def f(tensor, module):\n    return tensor._version, module._parameters, getattr(module, '_buffers')",
        "class A:\n    def f(self):\n        return self._num_steps",
        "import sys\nsys._getframe()",
    ],
)
def test_what_is_left_and_what_is_not_of_torch_is_not_found(source: str) -> None:
    assert private_uses(ast.parse(source)) == set()


@pytest.mark.parametrize("name", LEFT_ATTRIBUTES)
def test_attributes_that_are_left_are_in_the_installed_torch(name: str) -> None:
    assert hasattr(LEFT_ATTRIBUTES[name](), name)
