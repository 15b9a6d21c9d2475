"""The values that a step's Python looks at.

`if mask.all():` reads one value from the device and takes a branch. A captured step takes the branch that an ordinary
one took, and compares on the device: `flag |= (mask.all() != what it was)`. Only such reads of a truth value can be
guarded. A number that is read may be an index, a shape or a log line; a step that reads one is not captured.

Reads are seen by replacing methods of torch.Tensor while a step runs. A dispatch mode would see more, but compiled code
refuses it, and in backward it changes how gradients add up. Compiled code ends where Python looks at a value, and goes
on after it: the look itself is Python's, and is seen.
"""

import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

# Each hands a value to Python, and so waits for the device.
_NUMBERS = ("item", "tolist", "__int__", "__float__", "__complex__", "__index__")
_OWN_PACKAGES = ("torch", "shardwise")


class NotCaptured(Exception):  # noqa: N818 - says why; never leaves this package
    """A step that cannot be captured. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A truth value that the step looked at: where in its source, and what it was."""

    place: str
    value: bool


class NotedReads:
    """What one step read, which it watches: truth values in order.

    `unguarded`: the first read that cannot be guarded, in words; "" if there was none.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.unguarded = ""
        # Whether all of them were read before the last backward began, and whether that or the passes are over.
        self.early = True
        self.in_last_backward = False
        self.passes_over = False

    def last_backward_begins(self) -> None:
        self.in_last_backward = True

    def passes_are_over(self) -> None:
        self.passes_over = True

    def add(self, read: Read) -> None:
        if self.passes_over:
            self.refuse(f"{read.place} reads a value after backward")
            return
        self.early = self.early and not self.in_last_backward
        self.reads.append(read)

    def refuse(self, why: str) -> None:
        self.unguarded = self.unguarded or why


@contextmanager
def noting_reads(device_type: str) -> Iterator[NotedReads]:
    """Note what the step in here reads from the device."""
    noted = NotedReads()
    thread = threading.get_ident()

    def truth(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        place = _place(sys._getframe(2))
        with _allowed_to_wait(device_type):
            value = read(tensor)
        if threading.get_ident() == thread:
            noted.add(Read(place=place, value=bool(value)))
        else:
            noted.refuse(f"{place} reads a value in backward")
        return value

    def number(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        noted.refuse(f"{_place(sys._getframe(2))} reads a number from the device")
        with _allowed_to_wait(device_type):
            return read(tensor)

    with _replaced_reads(device_type, thread=thread, truth=truth, number=number):
        yield noted


@contextmanager
def assuming_reads(
    reads: Sequence[Read], *, device_type: str, compare: Callable[[Tensor, bool], None]
) -> Iterator[None]:
    """The step in here reads what `reads` say, in this order; each is compared on the device.

    Raises NotCaptured where it reads something else, or another number of values.
    """
    thread = threading.get_ident()
    left = list(reads)

    def truth(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        place = _place(sys._getframe(2))
        if threading.get_ident() != thread or not left or left[0].place != place:
            raise NotCaptured(f"{place} reads a value that ordinary steps did not read there")
        assumed = left.pop(0).value
        compare(tensor, assumed)
        return assumed

    def number(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        raise NotCaptured(f"{_place(sys._getframe(2))} reads a number from the device")

    with _replaced_reads(device_type, thread=thread, truth=truth, number=number):
        yield
    if left:
        raise NotCaptured(f"{left[0].place} reads a value in ordinary steps, and not in the captured one")


_Reader = Callable[[Tensor, Callable[[Tensor], Any]], Any]


@contextmanager
def _replaced_reads(device_type: str, *, thread: int, truth: _Reader, number: _Reader) -> Iterator[None]:
    """torch.Tensor's own methods hand their reads to `truth` and `number`: of this thread, and of its backward."""

    def replaced(name: str) -> Callable[..., Any]:
        own = getattr(Tensor, name)

        # What compiled code calls would be compiled as well.
        @_disable_dynamo
        def read(tensor: Tensor) -> Any:
            ours = threading.get_ident() == thread or torch._C._current_graph_task_id() != -1
            if tensor.device.type != device_type or not ours:
                return own(tensor)
            is_truth = name == "__bool__" or (name == "item" and tensor.dtype == torch.bool)
            return (truth if is_truth else number)(tensor, own)

        return read

    methods = {name: replaced(name) for name in ("__bool__", *_NUMBERS)}
    before = {name: Tensor.__dict__[name] for name in methods if name in Tensor.__dict__}
    for name, method in methods.items():
        setattr(Tensor, name, method)
    try:
        yield
    finally:
        for name in methods:
            if name in before:
                setattr(Tensor, name, before[name])
            else:
                # Inherited from the class below, and so again.
                delattr(Tensor, name)


@contextmanager
def _allowed_to_wait(device_type: str) -> Iterator[None]:
    """A read that is known needs no warning of `warned_of_waits`."""
    if device_type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def hidden_capture() -> Iterator[None]:
    """Whoever asks in here whether the stream is being captured is told no, unless it is torch or this package.

    Models ask in order to leave out what they think cannot be captured (transformers then builds attention masks that
    it otherwise does without), and would run other kernels than in an ordinary step. SyncBatchNorm and optimizers ask
    what to do, and are told the truth. torch.cuda's own function stays in its place and only learns another answer:
    compiled code was compiled for that function, and would be compiled again for another.
    """
    graphs: Any = torch.cuda.graphs
    truth, function = graphs._cuda_isCurrentStreamCapturing, graphs.is_current_stream_capturing.__code__

    @_disable_dynamo
    def answer() -> bool:
        frame = sys._getframe(1)
        while frame.f_code is not function and frame.f_back is not None:
            frame = frame.f_back
        asking = frame.f_back.f_globals.get("__name__", "") if frame.f_back is not None else ""
        return bool(truth()) if str(asking).partition(".")[0] in _OWN_PACKAGES else False

    graphs._cuda_isCurrentStreamCapturing = answer
    try:
        yield
    finally:
        graphs._cuda_isCurrentStreamCapturing = truth


def _place(frame: FrameType | None) -> str:
    """The line of the user's source that a frame belongs to; torch's own frames are passed over."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
        frame = frame.f_back
    if frame is None:
        return "Python"
    if frame.f_globals.get("__name__") == "shardwise.engine.core.used":
        return "the engine, for a parameter that got no gradient,"
    return source_line(frame.f_code.co_filename, frame.f_lineno)


def failing_line(error: BaseException) -> str:
    """Return the last line of source outside of torch and this package that an error passed through; "" if none.

    Frames are judged by their module, not by their path: a user's code may well lie in a folder called `shardwise`.
    """
    users = [
        source_line(frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not _is_own(frame)
    ]
    return users[-1] if users else ""


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN_PACKAGES


def source_line(file: str, number: int) -> str:
    """`model.py:12 (if mask.all():)`."""
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f" ({text[:80]})" if text else "")
