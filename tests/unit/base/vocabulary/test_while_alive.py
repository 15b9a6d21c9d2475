"""What is installed for objects comes with the first and goes with the last, whatever others installed meanwhile."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise.base.vocabulary.while_alive import WhileAlive, hooked, replaced

_HOOKS: OrderedDict[int, Callable[[], None]] = OrderedDict()


class User:
    """Refers to itself, as a model does: only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def register(hook: Callable[[], None]) -> RemovableHandle:
    handle = RemovableHandle(_HOOKS)
    _HOOKS[handle.id] = hook
    return handle


def call_hooks() -> None:
    for hook in _HOOKS.values():
        hook()


def hooks() -> list[int]:
    # Not read in a test: while the function that reads them runs, nothing is removed.
    return list(_HOOKS)


def num_optimizer_hooks() -> int:
    return len(_global_optimizer_pre_hooks)


def doubled(before: Callable[[int], int], number: int) -> int:
    return 2 * before(number)


def library() -> Any:
    return SimpleNamespace(number=lambda number: number)


def test_a_function_is_replaced_with_the_first_user_and_restored_with_the_last() -> None:
    torchs = library()
    own = torchs.number
    users: WhileAlive[User] = WhileAlive(replaced(torchs, "number", doubled))
    assert torchs.number is own
    one, other = User(), User()
    for user in (one, other, one):
        users.add(user)
    assert torchs.number(3) == 6
    assert set(users) == {one, other}
    del one, user
    gc.collect()
    assert torchs.number(3) == 6
    del other
    gc.collect()
    assert torchs.number is own
    users.add(again := User())
    assert torchs.number(3) == 6
    del again


def test_a_replacement_by_somebody_else_stays_and_ours_below_it_only_passes_calls_on() -> None:
    torchs = library()
    users: WhileAlive[User] = WhileAlive(replaced(torchs, "number", doubled))
    users.add(user := User())
    ours = torchs.number
    theirs = torchs.number = lambda number: ours(number) + 1
    assert torchs.number(3) == 7
    del user
    gc.collect()
    assert torchs.number is theirs
    assert torchs.number(3) == 4
    # Replaced again above theirs, and not doubled twice.
    users.add(user := User())
    assert torchs.number(3) == 8
    del user
    gc.collect()
    assert torchs.number is theirs


def test_a_method_that_a_class_inherits_is_inherited_again() -> None:
    class FullError(RuntimeError):
        pass

    noted: list[str] = []

    def note(init: Callable[..., None], error: FullError, text: str) -> None:
        init(error, text)
        noted.append(text)

    users: WhileAlive[User] = WhileAlive(replaced(FullError, "__init__", note))
    users.add(user := User())
    assert str(FullError("full")) == "full"
    del user
    gc.collect()
    assert "__init__" not in vars(FullError)
    assert str(FullError("fuller")) == "fuller"
    assert noted == ["full"]


def test_a_hook_whose_last_user_is_collected_while_hooks_are_called_goes_with_the_next_collection() -> None:
    calls: list[str] = []
    users: WhileAlive[User] = WhileAlive(hooked(register, lambda: calls.append("ours")))
    users.add(User())
    theirs = [register(gc.collect), register(lambda: calls.append("theirs"))]  # type: ignore[arg-type]
    call_hooks()
    assert calls == ["ours", "theirs"]
    assert len(hooks()) == 3
    assert list(users) == []
    gc.collect()
    assert hooks() == [handle.id for handle in theirs]
    for handle in theirs:
        handle.remove()


def test_a_hook_that_waits_for_its_removal_serves_the_next_user() -> None:
    users: WhileAlive[User] = WhileAlive(hooked(register, lambda: None))
    users.add(User())
    theirs = register(gc.collect)  # type: ignore[arg-type]
    call_hooks()
    users.add(user := User())
    gc.collect()
    assert len(hooks()) == 2
    del user
    gc.collect()
    assert hooks() == [theirs.id]
    theirs.remove()


def test_a_global_hook_of_torch_is_removed_between_two_steps_of_an_optimizer_and_not_in_one() -> None:
    num_before = num_optimizer_hooks()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: (gc.collect(), None)[1])
    users: WhileAlive[User] = WhileAlive(hooked(register_optimizer_step_pre_hook, lambda *_: None))
    users.add(User())
    optimizer.step()
    assert num_optimizer_hooks() == num_before + 1
    gc.collect()
    assert num_optimizer_hooks() == num_before
