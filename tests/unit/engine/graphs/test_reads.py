"""Truth values that a step looks at are noted, assumed and compared; numbers are not; nothing is left behind."""

import runpy
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.engine.graphs.reads import (
    NotCaptured,
    Read,
    assuming_reads,
    failing_line,
    hidden_capture,
    noting_reads,
)
from shardwise.torch_internals import torch_private


def looks(x: Tensor) -> str:
    if (x > 0).all():
        return "positive"
    return "big" if (x > -10).any().item() else "small"


def test_reads_are_noted_in_order_with_their_lines() -> None:
    with noting_reads("cpu") as noted:
        assert looks(torch.ones(3)) == "positive"
        assert looks(-torch.ones(3)) == "big"
    assert [read.value for read in noted.reads] == [True, False, True]
    assert [read.place.partition(" ")[2] for read in noted.reads] == [
        "(if (x > 0).all():)",
        "(if (x > 0).all():)",
        '(return "big" if (x > -10).any().item() else "small")',
    ]
    assert noted.unguarded == ""


def test_what_is_assumed_is_what_is_read_and_each_is_compared() -> None:
    with noting_reads("cpu") as noted:
        looks(-torch.ones(3))
    flags: list[tuple[Tensor, bool]] = []
    with assuming_reads(noted.reads, device_type="cpu", compare=lambda *seen: flags.append(seen)):
        assert looks(torch.ones(3)) == "big"
    assert [(bool(tensor), value) for tensor, value in flags] == [(True, False), (True, True)]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: [0, 1, 2, 3][x.long()[0]],
        lambda x: range(x.long()[0]),
    ],
)
def test_a_number_cannot_be_guarded(read: object) -> None:
    with noting_reads("cpu") as noted:
        read(torch.ones(3))  # type: ignore[operator]
    assert noted.unguarded.endswith("reads a number from the device")
    with pytest.raises(NotCaptured, match="reads a number"), assuming_reads([], device_type="cpu", compare=print):
        read(torch.ones(3))  # type: ignore[operator]


def test_more_fewer_or_other_reads_than_were_noted_are_refused() -> None:
    with noting_reads("cpu") as noted:
        looks(-torch.ones(3))
    with pytest.raises(NotCaptured, match="that ordinary steps did not read there"):  # noqa: SIM117
        with assuming_reads(noted.reads[:1], device_type="cpu", compare=lambda *seen: None):
            looks(torch.ones(3))
    with pytest.raises(NotCaptured, match="and not in the captured one"):  # noqa: SIM117
        with assuming_reads(noted.reads, device_type="cpu", compare=lambda *seen: None):
            pass
    other = [Read(place="elsewhere.py:1", value=True)]
    with pytest.raises(NotCaptured, match="did not read there"):  # noqa: SIM117
        with assuming_reads(other, device_type="cpu", compare=lambda *seen: None):
            looks(torch.ones(3))


def test_a_read_after_the_passes_is_not_guarded_and_one_in_the_last_backward_is_late() -> None:
    x = torch.ones(3)
    with noting_reads("cpu") as noted:
        bool(x[0])
        assert noted.early
        noted.last_backward_begins()
        bool(x[0])
        assert not noted.early
        noted.passes_are_over()
        bool(x[0])
    assert len(noted.reads) == 2
    assert noted.unguarded.endswith("reads a value after backward")


def test_other_devices_and_other_threads_are_left_alone() -> None:
    with noting_reads("cuda") as noted:
        looks(torch.ones(3))
    assert noted.reads == []
    with noting_reads("cpu") as noted:
        thread = threading.Thread(target=looks, args=(torch.ones(3),))
        thread.start()
        thread.join()
    assert noted.reads == []


def test_tensors_are_as_they_were_afterwards() -> None:
    before = {name: Tensor.__dict__.get(name) for name in ("__bool__", "item", "tolist", "__int__", "__index__")}
    with pytest.raises(ValueError, match="stop"), noting_reads("cpu"):
        raise ValueError("stop")
    assert before == {name: Tensor.__dict__.get(name) for name in before}


def test_model_code_is_told_that_nothing_is_captured_and_torch_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: True)
    monkeypatch.setattr(torch_private, "is_stream_capturing", lambda: True, raising=False)
    asking = "import torch\ndef ask():\n    return torch.cuda.is_current_stream_capturing()"
    answers = {}
    with hidden_capture():
        for name in ("torch.nn.modules._functions", "transformers.utils", "my_model"):
            scope = {"__name__": name}
            exec(asking, scope)
            answers[name] = scope["ask"]()  # type: ignore[operator]
    assert answers == {"torch.nn.modules._functions": True, "transformers.utils": False, "my_model": False}
    assert torch.cuda.is_current_stream_capturing()


def test_an_error_is_placed_in_the_users_source_also_below_a_folder_of_our_name(tmp_path: Path) -> None:
    file = tmp_path / "shardwise" / "torch" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text("import torch\ntorch.empty(2).view(3)\n")
    with pytest.raises(RuntimeError) as raised:
        runpy.run_path(str(file))
    assert failing_line(raised.value) == "model.py:2 (torch.empty(2).view(3))"
