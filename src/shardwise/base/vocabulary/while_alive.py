"""What is installed in another library only while an object that needs it is alive: hooks and replaced functions.

Importing this package changes no other library. What concerns a whole process (a hook on every optimizer, a function of
torch that is replaced) is installed with the first object that needs it, and removed when the last one is collected.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import Any, Generic, TypeVar

User = TypeVar("User")
Remove = Callable[[], bool]
"""Removes what was installed; returns False if that must wait."""
Install = Callable[[], Remove]

# Reentrant: a garbage collection may drop a user on any thread, including one that holds the lock.
_CHANGES = threading.RLock()


class WhileAlive(Generic[User]):
    """Objects that need something installed; iterating yields those that are alive."""

    def __init__(self, *installs: Install) -> None:
        self._installs = installs
        self._installed: dict[Install, Remove] = {}
        self._users: weakref.WeakSet[User] = weakref.WeakSet()

    def __iter__(self) -> Iterator[User]:
        return iter(list(self._users))

    def add(self, user: User) -> None:
        """Install what is missing. This does not keep `user` alive."""
        with _CHANGES:
            if user in self._users:
                return
            # First: the last user before this one may be collected at any moment.
            self._users.add(user)
            weakref.finalize(user, self._remove_unused).atexit = False
            for install in self._installs:
                if install not in self._installed:
                    self._installed[install] = install()

    def _remove_unused(self) -> None:
        with _CHANGES:
            if any(True for _ in self):
                return
            self._installed = {install: remove for install, remove in self._installed.items() if not remove()}
            if self._installed:
                _at_next_collection(self._remove_unused)


def hooked(register: Callable[..., Any], hook: Callable[..., Any]) -> Install:
    """Install a hook by a function of torch that returns a handle."""

    def install() -> Remove:
        handle = register(hook)

        def remove() -> bool:
            if _is_read(handle.hooks_dict_ref()):
                return False
            handle.remove()
            return True

        return remove

    return install


def replaced(owner: Any, name: str, call: Callable[..., Any]) -> Install:
    """Replace the function `owner.name` by `call`, whose first argument is the function that was there.

    If somebody has replaced it in the meantime, theirs stays, and ours below it only calls the one that was there.
    """

    def install() -> Remove:
        is_own, before = name in vars(owner), getattr(owner, name)
        active = True

        @wraps(before)
        def ours(*arguments: Any, **options: Any) -> Any:
            return call(before, *arguments, **options) if active else before(*arguments, **options)

        def remove() -> bool:
            nonlocal active
            active = False
            if vars(owner).get(name) is not ours:
                return True
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
            return True

        setattr(owner, name, ours)
        return remove

    return install


def _is_read(hooks: Any) -> bool:
    """Return whether a function that reads this dictionary runs on any thread: its loop would fail at a removal.

    A garbage collection, and so a removal, may come between any two instructions of such a function.
    """
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            variables = frame.f_globals
            if any(variables.get(name) is hooks for name in frame.f_code.co_names):
                return True
            frame = frame.f_back
    return False


class _Cycle:
    """Refers to itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        self._itself = self


def _at_next_collection(call: Callable[[], None]) -> None:
    weakref.finalize(_Cycle(), call).atexit = False
