from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.base.errors import InvalidModel, UnknownName
from shardwise.models.tasks import Task, load_task

OWN = """
import torch
from shardwise import Task

def make():
    return Task(
        model=torch.nn.Linear(3, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        make_batch=lambda size: torch.randn(size, 3),
    )

not_callable = 3

def not_a_task():
    return torch.nn.Linear(3, 1)

def fails():
    raise RuntimeError("mine")
"""


@pytest.mark.parametrize(
    ("name", "dataset"),
    [("gpt-tiny", "stdlib"), ("llama-tiny", "stdlib"), ("vit-digits", "digits"), ("resnet-digits", "digits")],
)
def test_a_catalogue_task_trains_and_evaluates(name: str, dataset: str) -> None:
    torch.manual_seed(0)
    task = load_task(name, dataset=dataset)
    assert task.dataset is not None
    assert task.evaluate is not None
    batch = next(iter(torch.utils.data.DataLoader(task.dataset, batch_size=8)))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    first = task.loss(task.model, batch)
    for _ in range(6):
        optimizer.zero_grad()
        task.loss(task.model, batch).backward()
        optimizer.step()
    assert task.loss(task.model, batch).item() < 0.9 * first.item()
    task.model.eval()
    sums = task.evaluate(task.model, batch)
    assert sums["count"] == batch[1].numel()
    torch.testing.assert_close(sums["loss"] / sums["count"], task.loss(task.model, batch))
    assert 0 <= sums["accuracy"] <= sums["count"]


def test_a_task_on_the_meta_device_makes_no_weight() -> None:
    task = load_task("llama-3.1-405b", device="meta", seq=64)
    loss = task.loss(task.model, task.make_batch(2))
    assert loss.is_meta
    assert loss.shape == ()


def test_seq_and_image_size_can_be_chosen() -> None:
    short = load_task("gpt-tiny", seq=16)
    assert short.make_batch(3)[0].shape == (3, 16)
    assert short.model.positions.weight.shape[0] == 128
    assert load_task("gpt-tiny", seq=200).model.positions.weight.shape[0] == 200
    assert load_task("vit-tiny", image=32, device="meta").make_batch(2)[0].shape == (2, 3, 32, 32)
    assert load_task("gpt-tiny", seq=16, dataset="stdlib").dataset[0][0].shape == (16,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reference": "gpt-tiny", "image": 8}, "gpt-tiny reads tokens"),
        ({"reference": "vit-tiny", "seq": 8}, "vit-tiny reads images"),
        ({"reference": "gpt-tiny", "seq": 0}, "--seq 0: must be at least 1"),
        ({"reference": "python:x.py:f", "dataset": "stdlib"}, "is for catalogue models"),
        ({"reference": "python:x.py"}, "must be python:FILE.py:function"),
        ({"reference": "python:none.py:f"}, "there is no file none.py"),
    ],
)
def test_what_has_no_meaning_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        load_task(**arguments)  # type: ignore[arg-type]


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean gpt-tiny"):
        load_task("gpt-tny")


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    task = load_task(f"python:{file}:make")
    assert task.loss(task.model, task.make_batch(5)).shape == ()
    with pytest.raises(InvalidModel, match="has no function nothing"):
        load_task(f"python:{file}:nothing")
    with pytest.raises(InvalidModel, match="has no function not_callable"):
        load_task(f"python:{file}:not_callable")
    with pytest.raises(InvalidModel, match=r"returned a Linear; it must return a shardwise\.Task"):
        load_task(f"python:{file}:not_a_task")
    with pytest.raises(InvalidModel, match=r"RuntimeError: mine \(own\.py, line 18\)"):
        load_task(f"python:{file}:fails")
    file.write_text("x = = 1")
    with pytest.raises(InvalidModel, match=r"SyntaxError: invalid syntax \(own\.py, line 1\)"):
        load_task(f"python:{file}:make")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "Task.model is a int"),
        ({"loss": None}, "Task.loss is a NoneType"),
        ({"make_batch": 3}, "Task.make_batch is a int"),
        ({"evaluate": 3}, "Task.evaluate is a int"),
        ({"dataset": iter([])}, "Task.dataset must have a length"),
    ],
)
def test_what_is_no_task_is_refused_where_it_is_made(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "model": nn.Linear(1, 1),
        "loss": lambda model, batch: model(batch).sum(),
        "make_batch": lambda size: torch.zeros(size, 1),
    }
    with pytest.raises(InvalidModel, match=message):
        Task(**(arguments | change))  # type: ignore[arg-type]


def test_a_function_may_take_the_length_of_samples(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from shardwise.models.tasks import Task\n"
        "def task(seq=4):\n"
        "    return Task(model=nn.Linear(2, 1), loss=lambda model, batch: model(batch).sum(),\n"
        "                make_batch=lambda size: torch.ones(size, seq, 2))\n"
        "def fixed():\n"
        "    return task()\n"
    )
    assert load_task(f"python:{file}:task").make_batch(1).shape == (1, 4, 2)
    assert load_task(f"python:{file}:task", seq=8).make_batch(1).shape == (1, 8, 2)
    with pytest.raises(InvalidModel, match=r"--seq needs a function that takes it: def fixed\(seq=…\)"):
        load_task(f"python:{file}:fixed", seq=8)
    with pytest.raises(InvalidModel, match="--image needs a function that takes it"):
        load_task(f"python:{file}:task", image=8)
