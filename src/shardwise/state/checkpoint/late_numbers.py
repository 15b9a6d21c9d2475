"""Numbers on a GPU that a description holds, such as step counts: read later, so that nobody waits for the device.

late = LateNumbers()
described = {"step": late.to_json(step)}        an empty dict, for now
late.copies()                                   (host, device) pairs, which the caller copies in any stream
late.fill()                                     when they are copied: the dicts hold the numbers
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from shardwise.state.checkpoint.typed import to_json


class LateNumbers:
    """Collects tensors of one number each on a GPU; each dict that it has given out is filled once."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], Tensor]]] = defaultdict(list)
        self._copied: list[tuple[list[tuple[dict[str, Any], Tensor]], Tensor]] = []

    def to_json(self, value: Any, *, what: str) -> Any:
        """Return `value` in JSON's types, or a dict that will hold it if it is a number on a GPU."""
        if not (isinstance(value, Tensor) and value.is_cuda and value.numel() == 1):
            return to_json(value, what=what)
        place: dict[str, Any] = {}
        self._waiting[value.device, value.dtype].append((place, value))
        return place

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return (host, device) for what was collected, with the values of now: later writes do not change them."""
        pairs = []
        for (_, dtype), places in self._waiting.items():
            values = torch.stack([value.detach().reshape(()) for _, value in places])
            host = torch.empty(len(places), dtype=dtype, pin_memory=True)
            self._copied.append((places, host))
            pairs.append((host, values))
        self._waiting.clear()
        return pairs

    def fill(self) -> None:
        """Put the numbers into their dicts."""
        for places, host in self._copied:
            for (place, value), number in zip(places, host, strict=True):
                place.update(to_json(number.reshape(value.shape), what="a number"))
        self._copied.clear()
