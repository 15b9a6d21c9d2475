"""Which tensors are copied to host memory, when their device memory is released, and that no copy is used before it is done."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine.live_bytes import Ledger
from torch import Tensor, nn

from shardwise.engine.activations.offload import ActivationOffload, offload_unit
from shardwise.engine.activations.recompute import recompute_unit
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape

SHAPE = GPTShape(num_layers=4, width=32, num_heads=2, vocab_size=16, max_seq=8, dropout=0.1)
STREAM_BYTES = 3 * 8 * 32 * 4


class LateLane:
    """Copies that take place when they are waited for, and not before; until then their targets hold NaNs.

    As on a GPU, copies run in the order of their issue. One whose memory on the device is gone by then has read or
    written what was handed back; that is an error, unless it was read into host memory that is gone as well.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, Any, Any]] = []
        self.num_events = 0
        self.log: list[tuple[str, int]] = []
        self.sent: list[tuple[int, int]] = []

    def send(self, source: Tensor) -> tuple[Tensor, int]:
        self.sent.append((source.untyped_storage()._cdata, source.nbytes))
        self.log.append(("send", source.nbytes))
        return self._begin(source, keep_source=False)

    def bring(self, sources: list[Tensor]) -> list[tuple[Tensor, int]]:
        self.log.append(("bring", sum(source.nbytes for source in sources)))
        return [self._begin(source, keep_source=True) for source in sources]

    def _begin(self, source: Tensor, *, keep_source: bool) -> tuple[Tensor, int]:
        target = torch.full_like(source, 255)
        self.num_events += 1
        # Host memory that copies use is torch's to keep; the device's is the engine's.
        hold = (lambda: source) if keep_source else weakref.ref(source)
        self.pending.append((self.num_events, hold, weakref.ref(target)))
        return target, self.num_events

    def wait(self, event: int) -> None:
        while self.pending and self.pending[0][0] <= event:
            _, source, target = self.pending.pop(0)
            if target() is None and source() is None:
                continue
            assert source() is not None, "memory was handed back before it was copied"
            assert target() is not None, "memory was handed back while it was being filled"
            target().copy_(source())


def make(*, mode: str = "none", shape: GPTShape = SHAPE) -> tuple[nn.Module, ActivationOffload, LateLane]:
    torch.manual_seed(0)
    model = build_model(shape)
    offload = ActivationOffload(model, device=torch.device("cpu"))
    offload.lane = lane = LateLane()
    for index, block in enumerate(model.blocks):
        if mode != "none":
            recompute_unit(block, mode=mode, pack=offload.pack)
        offload_unit(block, name=f"blocks.{index}", offload=offload)
    return model, offload, lane


def tokens(step: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (3, 8), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, *, num_steps: int = 3, twice: bool = False) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(num_steps):
        loss = model(tokens(step)).logsumexp(-1).mean()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("twice", [False, True], ids=["", "twice"])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_offloaded_units_train_the_same_however_late_the_copies_are(mode: str, twice: bool) -> None:
    torch.manual_seed(0)
    expected = train(build_model(SHAPE), twice=twice)
    model, offload, _ = make(mode=mode)
    found = train(model, twice=twice)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # Nothing outlasts the step.
    assert not offload._incoming
    assert not offload._copies


def test_what_is_saved_goes_and_comes_once_and_parameters_and_buffers_never() -> None:
    shape = GPTShape(num_layers=2, width=32, num_heads=2, vocab_size=16, max_seq=8)
    model, _, lane = make(shape=shape)
    resident = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    torch.manual_seed(0)
    block = build_model(shape).blocks[0]
    x = torch.randn(3, 8, 32)
    with Ledger() as ledger:
        output = block(x)
    saved_bytes = ledger.live_bytes(besides=[x, output, *block.parameters()]) + x.nbytes
    loss = model(tokens(0)).sum()
    assert sum(num_bytes for _, num_bytes in lane.sent) == 2 * saved_bytes
    assert not resident & {address for address, _ in lane.sent}
    lane.log.clear()
    loss.backward()
    # The second unit was still there.
    assert lane.log == [("bring", saved_bytes)]


@pytest.mark.parametrize(("mode", "streams"), [("full", 1), ("selective", 1 + 3 + 1 + 1 + 4)])
def test_a_recomputed_unit_sends_what_it_is_recomputed_from_and_the_last_unit_stays(mode: str, streams: int) -> None:
    model, _, lane = make(mode=mode, shape=GPTShape(num_layers=4, width=32, num_heads=2, vocab_size=16, max_seq=8))
    train(model, num_steps=2)
    lane.sent.clear()
    model(tokens(2))
    statistics_bytes = 3 * 2 * 8 * 4 if mode == "selective" else 0
    assert sum(num_bytes for _, num_bytes in lane.sent) == 3 * (streams * STREAM_BYTES + statistics_bytes)


def test_the_unit_that_backward_comes_to_next_is_brought_in_ahead_and_no_further() -> None:
    model, _, lane = make(mode="full")
    train(model, num_steps=2)
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda module, inputs, output, index=index: (
                output.register_hook(lambda grad: lane.log.append(("backward", index))) and None
            )
        )
    lane.log.clear()
    loss = model(tokens(2)).sum()
    assert lane.log == [("send", STREAM_BYTES)] * 3
    lane.log.clear()
    loss.backward()
    bring = ("bring", STREAM_BYTES)
    assert lane.log == [
        ("backward", 3), bring, ("backward", 2), bring, ("backward", 1), bring, ("backward", 0)
    ]  # fmt: skip


class Elsewhere:
    """Host memory that torch does not know of."""

    def send(self, source: Tensor) -> tuple[Any, bool]:
        return source.numpy().copy(), True

    def bring(self, sources: list[Any]) -> list[tuple[Tensor, bool]]:
        return [(torch.from_numpy(source.copy()), True) for source in sources]

    def wait(self, event: bool) -> None:
        pass


def test_after_forward_only_the_last_unit_holds_memory() -> None:
    model, offload, _ = make()
    offload.lane = Elsewhere()
    train(model, num_steps=1)
    live = []
    for blocks in (model.blocks[:1], model.blocks):
        x = torch.randn(3, 8, 32, requires_grad=True)
        # A forward and a backward for it to learn which unit is the last.
        for _ in range(2):
            y = x
            with Ledger() as ledger:
                for block in blocks:
                    y = block(y)
            live.append(ledger.live_bytes(besides=[x, y, *model.parameters()]))
            y.sum().backward()
    # The last unit's input was made by the unit before it.
    assert live[3] == live[1] + STREAM_BYTES > 10 * STREAM_BYTES


def test_backwards_that_do_not_come_by_leave_no_copy_unawaited() -> None:
    model, offload, _ = make()
    train(model, num_steps=1)
    inner: list[Tensor] = []
    handle = model.blocks[2].register_forward_hook(lambda module, inputs, output: inner.append(inputs[0]))
    for _ in range(2):
        loss = model(tokens(0)).sum()
        # As far as the third unit; the second is on its way in, and is dropped with the graph.
        torch.autograd.grad(loss, inner.pop())
        del loss
    handle.remove()
    model(tokens(0))
    with pytest.raises(ZeroDivisionError):
        fails = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        model(tokens(0))
    fails.remove()
    with torch.no_grad():
        model(tokens(0))
    train(model, num_steps=2)
    assert not offload._incoming


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * mask


def test_a_tensor_that_several_units_save_is_sent_once() -> None:
    blocks = nn.ModuleList(Shared() for _ in range(3))
    offload = ActivationOffload(blocks, device=torch.device("cpu"))
    offload.lane = lane = LateLane()
    for block in blocks:
        offload_unit(block, name="block", offload=offload)
    mask = torch.rand(8, 32, requires_grad=True) * 2
    x = torch.randn(8, 32)
    for block in blocks:
        x = block(x, mask)
    # The input, the tanh and the mask; then the input and the tanh.
    assert len(lane.sent) == 3 + 2 + 2
    x.sum().backward()


@pytest.mark.parametrize("which", ["activation", "parameter"])
def test_what_is_written_into_after_it_was_saved_is_refused_as_torch_refuses_it(which: str) -> None:
    linear = nn.Linear(4, 4)
    offload = ActivationOffload(linear, device=torch.device("cpu"))
    offload_unit(linear, name="linear", offload=offload)
    x = torch.randn(4, 4, requires_grad=True) * 1
    loss = linear(x).sum()
    with torch.no_grad():
        (x if which == "activation" else linear.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_dropped_model_is_freed_with_all_that_it_saved() -> None:
    model, offload, _ = make(mode="selective")
    train(model, num_steps=1)
    loss = model(tokens(0)).sum()
    followed = [weakref.ref(model), weakref.ref(offload), *(weakref.ref(copy) for copy in offload._copies.values())]
    del model, offload, loss
    gc.collect()
    assert not any(reference() for reference in followed)


def test_a_small_part_of_a_large_storage_stays() -> None:
    linear = nn.Linear(4, 4)
    offload = ActivationOffload(linear, device=torch.device("cpu"))
    offload.lane = lane = LateLane()
    offload_unit(linear, name="linear", offload=offload)
    large = torch.randn(100, 4)
    F.relu(linear(large[:10])).sum().backward()
    assert not lane.sent
    linear(large[:50]).sum().backward()
    assert [num_bytes for _, num_bytes in lane.sent] == [large.nbytes]
