"""What of the comparison of ranks needs no ranks."""

from typing import Any

import pytest
import torch

from shardwise.engine.guards.same_order import SameOrder


class Asked:
    """An event of a stream that captures: CUDA refuses every question."""

    def query(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_while_a_stream_captures_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    same_order: Any = SameOrder.__new__(SameOrder)
    same_order._copied = Asked()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    same_order.check()
    # It is still to be looked at.
    assert same_order._copied is not None
