"""Callers look the engine of a model up and call it; hardly any of them asks which engine it is."""

import ast
import copy
import inspect
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise
from shardwise import engines
from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.engine.carry import carry_engine, drop_engine
from shardwise.engine.our_engine import Engine
from shardwise.engine.torch_engine.plain_model import PlainModel, state_of
from shardwise.engine.torch_engine.torch_engine import TorchEngine
from shardwise.engines import AnyEngine, find_engine, require_engine
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, CallLimit

SOURCE = Path(shardwise.__file__).parent
# Each has its reason: `prepare` chooses the engine; the rules of a step are those of its engine; a rehearsal finds DDP
# anywhere in another library's model; a benchmark names its cases.
MAY_ASK = {"engines.py", "program/build.py", "comm/job/absent.py", "measure/bench/modes.py"}

# What counts as asking. Functions that tell one engine from another:
ASKING_FUNCTIONS = {"is_prepared", "is_on_torch"}
# isinstance and issubclass of these:
ENGINE_CLASSES = {
    *("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"),
    *("Engine", "EngineParts", "TorchEngine", "PlainModel", "PreparedModule"),
}
# ==, !=, in, not in, is, match and startswith between an expression called `engine` and these:
ENGINE_NAMES = set(LIMITS)
# `from shardwise.engine.engine import` anything but the public function: the parts are those of one engine.
PUBLIC_PARTS = {"tape"}


def last_name(node: ast.expr) -> str:
    """`engine` of `case.plan.engine`, `engine` and `x.engine.lower()`."""
    if isinstance(node, ast.Call):
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def literals(nodes: list[ast.expr]) -> set[Any]:
    return {inner.value for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Constant)}


def asks(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "shardwise.engine.engine":
        return not {alias.name for alias in node.names} <= PUBLIC_PARTS
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(last_name(side) == "engine" for side in sides) and bool(ENGINE_NAMES & literals(sides))
    if isinstance(node, ast.Match):
        return last_name(node.subject) == "engine"
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else last_name(node.func)
    if called in ("isinstance", "issubclass"):
        return any(
            last_name(inner) in ENGINE_CLASSES for inner in ast.walk(node.args[1]) if isinstance(inner, ast.expr)
        )
    if called == "startswith":
        return last_name(node) == "engine" and bool(ENGINE_NAMES & literals(node.args))
    return called in ASKING_FUNCTIONS


def askers() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.split("/")[0] == "engine":
            continue
        if any(asks(node) for node in ast.walk(ast.parse(path.read_text()))):
            yield name


@pytest.mark.parametrize(
    "code",
    [
        "is_prepared(model)",
        "prepare.is_on_torch(model)",
        'plan.engine == "torch"',
        '"shardwise" != self.config.plan.engine',
        'engine in ("torch", "other")',
        'case.engine.startswith("torch")',
        "isinstance(model, nn.parallel.DistributedDataParallel | FSDPModule)",
        "isinstance(find_engine(model), TorchEngine)",
        "from shardwise.engine.engine import engine_of",
        "match plan.engine:\n    case 'torch': ...",
    ],
)
def test_each_way_of_asking_is_found(code: str) -> None:
    assert any(asks(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "LIMITS[plan.engine].why_not(plan)",
        'print(f"engine {plan.engine}")',
        'Plan(engine="torch" if kind else "shardwise")',
        "find_engine(model) is None",
        "isinstance(batch, Tensor)",
        "from shardwise.engine.engine import tape",
    ],
)
def test_what_is_shown_or_looked_up_does_not_count_as_asking(code: str) -> None:
    assert not any(asks(node) for node in ast.walk(ast.parse(code)))


def test_at_most_four_files_outside_the_engines_ask_which_engine_runs_a_model() -> None:
    assert len(MAY_ASK) <= 4
    assert set(askers()) == MAY_ASK


# Ours without its parts, which a model would have.
OURS = Engine.__new__(Engine)
TORCHS = TorchEngine(nn.Linear(2, 2), Plan(engine="torch"))


def methods_of(engine: AnyEngine, *classes: type) -> dict[str, inspect.Signature]:
    """The public methods that these classes give an engine."""
    names = [name for kind in classes for name, value in vars(kind).items() if inspect.isroutine(value)]
    return {name: inspect.signature(getattr(engine, name)) for name in names if not name.startswith("_")}


def test_both_engines_have_the_same_methods_with_the_same_parameters() -> None:
    """So a caller need not ask which one a model has: mypy checks each call of `AnyEngine` against both."""
    ours, torchs = methods_of(OURS, Engine), methods_of(TORCHS, TorchEngine, PlainModel)
    assert ours.keys() == torchs.keys()
    assert len(ours) > 20
    for name, signature in ours.items():
        assert signature.parameters == torchs[name].parameters, name


def test_every_public_function_is_a_method_with_the_same_parameters() -> None:
    functions = dict(inspect.getmembers(engines, inspect.isfunction))
    public = {
        name for name, value in functions.items() if value.__module__ == engines.__name__ and name in shardwise.__all__
    }
    public.remove("prepare")
    assert len(public) == 12
    for name in public:
        own, method = inspect.signature(functions[name]), inspect.signature(getattr(OURS, name))
        assert own.parameters["model"].annotation is nn.Module
        assert list(own.parameters.values())[1:] == list(method.parameters.values()), name
        # The words are those of the engine that does it.
        assert functions[name].__doc__ == getattr(Engine, name).__doc__


def carried(strategy: str) -> nn.Module:
    """A model that carries torch's engine: refusals come before anything is done with it."""
    model = nn.Linear(2, 2)
    carry_engine(model, TorchEngine(model, Plan(engine="torch", strategy=strategy)))
    return model


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "replan": lambda model: shardwise.replan(model, Plan()),
    "join": lambda model: shardwise.join(model, []),
    "whole": shardwise.whole,
    "save_pretrained": lambda model: shardwise.save_pretrained(model, "nowhere"),
    "from_pretrained": lambda model: shardwise.from_pretrained(None, "nowhere", Plan(engine="torch")),
}
OF_PREPARE: dict[str, Any] = {"collectives": object(), "weights": {}, "optimizers": []}


def call(limit: CallLimit) -> object:
    if limit.function == "prepare":
        given = OF_PREPARE[limit.argument]
        optimizers = given if limit.argument == "optimizers" else None
        options = {} if limit.argument == "optimizers" else {limit.argument: given}
        return shardwise.prepare(nn.Linear(2, 2), optimizers, Plan(engine="torch"), **options)
    return CALLS[limit.function](carried("fsdp"))


CALLED = [limit for limit in LIMITS["torch"].calls if limit.function in (*CALLS, "prepare")]


@pytest.mark.parametrize("limit", CALLED, ids=[f"{limit.function} {limit.argument}" for limit in CALLED])
def test_what_torchs_engine_does_not_have_is_refused_by_the_table(limit: CallLimit) -> None:
    with pytest.raises(InvalidPlan) as caught:
        call(limit)
    assert str(caught.value) == limit.sentence


def test_the_rows_without_a_call_here_are_read_by_callers_with_sentences_of_their_own() -> None:
    others = {limit.function for limit in LIMITS["torch"].calls} - {*CALLS, "prepare"}
    assert others == {"tape", "integrations", "muon"}
    with pytest.raises(InvalidPlan, match="integrations run engine = 'shardwise'"):
        LIMITS["torch"].check_call("integrations", Plan(engine="torch"))


def test_torchs_engine_refuses_nothing_by_itself_and_no_sentence_of_the_table_is_written_twice() -> None:
    engine = ast.parse((SOURCE / "engine/torch_engine/torch_engine.py").read_text())
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(engine))
    sources = {path: path.read_text() for path in SOURCE.rglob("*.py") if path.name != "limits.py"}
    for limit in LIMITS["torch"].calls:
        begin = re.split(r"[:;]", limit.sentence)[0]
        if begin != "plan.engine = 'torch'":
            assert not [path for path, text in sources.items() if begin in text], limit.sentence


def test_our_engine_has_every_call_and_torchs_has_whole_parameters_under_ddp() -> None:
    assert LIMITS["shardwise"].calls == ()
    assert isinstance(shardwise.whole(carried("ddp")), nullcontext)


def test_a_model_that_was_not_prepared_is_refused_in_one_line() -> None:
    model = nn.Linear(2, 2)
    assert find_engine(model) is None
    for function in (shardwise.edit, shardwise.grad_norms, shardwise.whole):
        with pytest.raises(InvalidModel, match=r"^this Linear has not been through shardwise\.prepare$"):
            function(model)


def test_what_only_our_engine_has_is_refused_in_one_line_on_torchs() -> None:
    line = r"^this Linear runs on engine = 'torch': this takes engine = 'shardwise'$"
    with pytest.raises(InvalidModel, match=line):
        shardwise.extend(carried("ddp"))
    with pytest.raises(InvalidModel, match=line), shardwise.tape(carried("ddp")):
        pass


def test_a_model_carries_its_engine_and_so_does_a_copy_until_it_is_dropped() -> None:
    model = carried("ddp")
    twin = copy.deepcopy(model)
    assert require_engine(twin).bare is twin
    drop_engine(twin)
    assert find_engine(twin) is None
    assert require_engine(model) is state_of(model)
    assert isinstance(state_of(twin), PlainModel)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_torchs_engine_lets_its_model_go_and_a_copy_has_an_engine_of_its_own(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model: nn.Module = nn.Linear(2, 2)
    carry_engine(model, TorchEngine(model, Plan(engine="torch")))
    other = copied(model)
    assert require_engine(other).model is other
    assert require_engine(other).plan == Plan(engine="torch")
    gone = weakref.ref(model)
    del model
    assert gone() is None, "only a garbage collection would free it"
