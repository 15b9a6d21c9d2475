"""Values that a step's Python reads from the device.

`if mask.all():` reads one value from the device and takes a branch. A captured step takes the branch that an ordinary
one took, and compares on the device: `flag |= (mask.all() != the value then)`. Only such reads of a truth value can be
guarded. A number may be used as an index, a shape or in a log line; a step that reads one is not captured.

Reads are intercepted by replacing methods of torch.Tensor while a step runs. A dispatch mode would intercept more, but
compiled code refuses it, and in backward it changes how gradients add up. Compiled code breaks its graph where Python
reads a value: the read itself is Python's, and is intercepted.
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

from shardwise.torch_internals import torch_private
from shardwise.torch_internals.torch_private import disable_dynamo

# Each returns a value to Python, and so waits for the device.
_NUMBERS = ("item", "tolist", "__int__", "__float__", "__complex__", "__index__")
_OWN_PACKAGES = ("torch", "shardwise")
# The beginning of torch's error for code that would have to be compiled again during a recording.
_RECOMPILES = "Detected recompile when torch.compile stance is 'fail_on_recompile'."


class NotCaptured(Exception):  # noqa: N818 - never leaves this package
    """A step cannot be captured. The message is the reason, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A truth value that the step has read: the place in its source, and the value."""

    place: str
    value: bool


class NotedReads:
    """The truth values that one step has read, in order.

    `unguarded`: the first read that cannot be guarded, in words; "" if there was none.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.unguarded = ""
        # Whether all of them were read before the last backward; the rest is the state of the step.
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
    """Note the values that the step in this block reads from the device."""
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
    """Give the step in this block the values of `reads`, in order; each is compared on the device.

    Raises NotCaptured if it reads at another place, or more or fewer values.
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
    """Send the reads of this thread, and of its backward, to `truth` and `number` instead of torch.Tensor's methods."""

    def replaced(name: str) -> Callable[..., Any]:
        own = getattr(Tensor, name)

        # Otherwise compiled code that calls it would compile it too.
        @disable_dynamo
        def read(tensor: Tensor) -> Any:
            ours = threading.get_ident() == thread or torch_private.current_graph_task_id() != -1
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
                # Inherited from the base class.
                delattr(Tensor, name)


@contextmanager
def _allowed_to_wait(device_type: str) -> Iterator[None]:
    """Turn off torch's warning about waits (StepDevice.noting_waits): this read is noted already."""
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
    """Report to all code but torch's and ours that the stream is not being captured.

    A model that asks leaves out code that it assumes cannot be captured (transformers then builds attention masks that
    it otherwise does without), and would run other kernels than in an ordinary step. SyncBatchNorm and optimizers need
    the true answer. torch.cuda's function stays the same object, only its answer changes: code compiled with that
    function would be compiled again for another one.
    """
    graphs: Any = torch.cuda.graphs
    function = graphs.is_current_stream_capturing.__code__

    @disable_dynamo
    def answer() -> bool:
        frame = sys._getframe(1)
        while frame.f_code is not function and frame.f_back is not None:
            frame = frame.f_back
        asking = frame.f_back.f_globals.get("__name__", "") if frame.f_back is not None else ""
        return bool(torch_private.is_stream_capturing()) if str(asking).partition(".")[0] in _OWN_PACKAGES else False

    before = torch_private.replace("is_stream_capturing", answer)
    try:
        yield
    finally:
        torch_private.replace("is_stream_capturing", before)


def _place(frame: FrameType | None) -> str:
    """Return the line of the user's source that called a frame; torch's own frames are skipped."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
        frame = frame.f_back
    if frame is None:
        return "Python"
    if frame.f_globals.get("__name__") == "shardwise.engine.core.used":
        return "the engine, for a parameter that got no gradient,"
    return source_line(frame.f_code.co_filename, frame.f_lineno)


def in_one_line(error: BaseException) -> str:
    """Return what went wrong, after the last line of the user's source that the error passed through."""
    if isinstance(error, NotCaptured):
        return str(error)
    message = str(error).strip().splitlines()[0][:200]
    if message.startswith(_RECOMPILES):
        return f"torch.compile compiles again when the step is recorded: {message.removeprefix(_RECOMPILES).strip()}"
    place = failing_line(error)
    return f"{place}: {message}" if place else message


def failing_line(error: BaseException) -> str:
    """Return the last line of source outside of torch and this package that an error passed through; "" if none.

    Frames are classified by module, not by path: a user's code may be in a folder called `shardwise`.
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
    """Return a line as `model.py:12 (if mask.all():)`."""
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f" ({text[:80]})" if text else "")
