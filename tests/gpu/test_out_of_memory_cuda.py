"""A full GPU: what the error tells of the memory adds up to what torch has allocated."""

import gc
import re
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.job.join import joined
from shardwise.engine import out_of_memory
from shardwise.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

WIDTH = 1024
_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Wide(nn.Module):
    """Keeps an activation as large as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.repeat(self.times, 1)).square()


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The model of another test may still be alive, and would be counted.
    monkeypatch.setattr(out_of_memory._MODELS, "_users", weakref.WeakSet())
    with joined(torch.device("cuda")):
        yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("where", ["forward", "update"])
def test_the_ledger_of_a_full_gpu_adds_up_to_what_is_allocated(where: str) -> None:
    model = nn.Sequential(Wide(), Wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    # With units as graphs, the optimizer's state would be there before the first forward.
    shardwise.prepare(model, optimizer, Plan(strategy="fsdp", units="class:Wide", capture="off"), device="cuda")
    x = torch.randn(64, WIDTH, device="cuda")
    free, total = torch.cuda.mem_get_info()
    filler = None
    with pytest.raises(torch.OutOfMemoryError) as raised:
        if where == "forward":
            model[1].times = 2 * free // x.nbytes
        loss = model(x).mean()
        loss.backward()
        torch.cuda.empty_cache()
        # All but 6 MiB is gone: the first update makes moments of 16 MiB.
        filler = [torch.empty(torch.cuda.mem_get_info()[0] - 6 * 2**20, dtype=torch.uint8, device="cuda")]
        optimizer.step()
    del filler
    first, held, *_ = raised.value.__notes__[0].splitlines()
    assert first.startswith(f"rank 0 ran out of memory in step 1, {where}")
    sizes = {
        name: float(number.replace(",", "")) * _SIZES[unit]
        for name, number, unit in re.findall(r"(\w+) ([\d.,]+) (\w?i?B)", held)
    }
    assert sizes["params"] == pytest.approx(2 * 4 * (WIDTH * WIDTH + WIDTH), rel=0.01)
    assert total == torch.cuda.get_device_properties(0).total_memory
    named = sum(sizes[name] for name in ("params", "gathered", "grads", "reduce", "optim", "activations", "other"))
    allocated = re.search(r"in all ([\d.,]+) (\w+) allocated", held)
    assert allocated is not None
    assert named == pytest.approx(float(allocated[1].replace(",", "")) * _SIZES[allocated[2]], rel=0.01)


def test_a_full_gpu_in_backward_is_told_of_with_its_unit() -> None:
    model = nn.Sequential(Wide(), Wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shardwise.prepare(model, optimizer, Plan(strategy="ddp", units="class:Wide"), device="cuda")
    loss = model(torch.randn(4096, WIDTH, device="cuda")).mean()
    torch.cuda.empty_cache()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - 4 * 2**20, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        # The gradient of the activations takes 16 MiB.
        loss.backward()
    del filler
    assert raised.value.__notes__[0].startswith("rank 0 ran out of memory in step 1, ")
    assert "activations " in raised.value.__notes__[0]
