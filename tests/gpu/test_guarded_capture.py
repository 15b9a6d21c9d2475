"""Captured steps are ordinary steps, bit for bit; what cannot be captured stays an ordinary step, and says why."""

import random
from typing import Any

import pytest
import torch
from capture_cases import Masked, gpt_batch, masked_batch, masked_loss, run, tokens
from torch import Tensor, nn

import shardwise
from shardwise import Plan
from shardwise.models.tasks import cross_entropy
from shardwise.plan.placement import STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def both(strategy: str = "fsdp", *, precision: str = "fp32", **how: Any) -> tuple[Any, Any]:
    """(captured, ordinary) of the same training."""
    settings = {key: how.pop(key) for key in ("recompute", "units") if key in how}
    found = [
        run(Plan(strategy=strategy, precision=precision, capture=capture, **settings), **how)
        for capture in ("auto", "off")
    ]
    return found[0], found[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_bits_of_ordinary_steps(strategy: str, precision: str) -> None:
    captured, ordinary = both(strategy, precision=precision, steps=50)
    assert captured.same_as(ordinary)
    assert captured.lines == ["capture: steps are replayed as CUDA graphs from here on"]
    # Replays 1 and 10 are compared with an ordinary step, which counts.
    assert [number for number, replayed in enumerate(captured.replayed) if not replayed] == [0, 1, 2, 3, 12]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_tenth_of_the_batches_is_padded_and_every_violation_is_caught(strategy: str) -> None:
    chosen = random.Random(3)
    padded = {step for step in range(6, 200) if chosen.random() < 0.1}

    def batch(step: int) -> dict[str, Tensor]:
        return masked_batch(step, padded=padded.__contains__)

    captured, ordinary = both(strategy, make_model=Masked, loss=masked_loss, batch=batch, steps=200)
    assert captured.same_as(ordinary)
    assert captured.lines[0].endswith("1 values that it looks at are guarded")
    assert len(captured.lines) == 1
    # Padded steps are ordinary until they have a graph of their own.
    assert sum(captured.replayed) > 180
    assert not captured.replayed[min(padded)]


def test_dropout_draws_the_numbers_of_ordinary_steps_also_when_a_guard_fails() -> None:
    def batch(step: int) -> dict[str, Tensor]:
        return masked_batch(step, padded=lambda step: step in (8, 15))

    captured, ordinary = both(make_model=lambda: Masked(dropout=0.3), loss=masked_loss, batch=batch)
    assert captured.same_as(ordinary)
    assert not captured.replayed[8]
    assert captured.replayed[9]


def test_accumulation_of_four_passes_of_which_one_breaks_its_guard() -> None:
    def batch(step: int) -> dict[str, Tensor]:
        return masked_batch(step, padded=lambda step: step == 41)

    captured, ordinary = both(make_model=Masked, loss=masked_loss, batch=batch, passes=4, steps=20)
    assert captured.same_as(ordinary)
    assert "4 values" in captured.lines[0]
    assert not captured.replayed[10]


def test_two_shapes_in_turn_and_an_evaluation_in_between() -> None:
    def look(model: nn.Module, optimizer: Any, step: int) -> None:
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                cross_entropy(model, gpt_batch(99))
            model.train()

    captured, ordinary = both(batch=lambda step: gpt_batch(step, size=2 + 2 * (step % 2)), between=look, steps=40)
    assert captured.same_as(ordinary)
    assert sum(captured.replayed) > 25


def test_a_batch_whose_keys_come_in_another_order_is_another_batch() -> None:
    def batch(step: int) -> dict[str, Tensor]:
        found = masked_batch(step, padded=lambda _: False)
        return found if step % 3 else dict(reversed(found.items()))

    captured, ordinary = both(make_model=Masked, loss=masked_loss, batch=batch)
    assert captured.same_as(ordinary)
    assert sum(captured.replayed) > 15


def test_a_schedule_and_an_option_that_changes_are_followed() -> None:
    def change(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"].fill_(1e-3 * 0.9**step)
        if step == 12:
            optimizer.param_groups[0]["weight_decay"] = 0.3
        if step == 20:
            model.blocks[0].requires_grad_(False)

    captured, ordinary = both("ddp", between=change, steps=32)
    assert captured.same_as(ordinary)
    assert captured.replayed[11]
    assert not captured.replayed[12]
    assert captured.replayed[-1], captured.lines


def test_full_and_selective_recomputation() -> None:
    for recompute in ("full", "selective"):
        captured, ordinary = both(recompute=recompute, precision="bf16", steps=14)
        assert captured.same_as(ordinary), recompute
        assert sum(captured.replayed) > 8, recompute


class Layerdrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = x + y * (torch.rand([]) < 0.8).item()
        return x


class Indexing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        last = (x[:, 0] > 0).sum().item()
        return super().forward(x)[: 1 + int(last) * 0]


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Masking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class BackwardReads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1.0 + bool(grad.sum().item()))


class ReadsInBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return BackwardReads.apply(super().forward(x))


@pytest.mark.parametrize(
    ("make_model", "why"),
    [
        (Layerdrop, "draws random numbers from torch's generator on the CPU"),
        (lambda: Indexing(64, 64), "last = (x[:, 0] > 0).sum().item()) reads a number from the device"),
        (lambda: Counting(64, 64), "model.calls changes in Python in each step"),
        (lambda: Masking(64, 64), "super().forward(x[x[:, 0] > 0])) waits for the device"),
        (lambda: ReadsInBackward(64, 64), "reads a number from the device"),
    ],
)
def test_what_cannot_be_captured_stays_ordinary_with_one_line(make_model: Any, why: str) -> None:
    def batch(step: int) -> Tensor:
        return torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()

    captured, ordinary = both(
        make_model=make_model, loss=lambda model, x: model(x).square().mean(), batch=batch, steps=10
    )
    assert captured.same_as(ordinary)
    assert not any(captured.replayed)
    assert len(captured.lines) == 1
    assert why in captured.lines[0]


def test_what_the_plan_or_optimizer_rules_out_stays_ordinary_with_one_line() -> None:
    found = run(Plan(precision="fp16", capture="auto"), steps=5)
    assert found.lines == ["capture: ordinary steps, not captured: with precision = 'fp16' a step waits for the device"]
    found = run(Plan(capture="auto"), steps=5, make_optimizer=torch.optim.SGD, lr=0.1)
    assert found.lines == ["capture: ordinary steps, not captured: SGD has no option capturable, as AdamW has"]


def test_dropout_under_recomputation_stays_ordinary_with_one_line() -> None:
    class Block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2))

    captured, ordinary = both(
        recompute="full",
        units="class:Block",
        make_model=lambda: nn.Sequential(Block(), Block(), nn.Linear(64, 64)),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda step: torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda(),
        steps=8,
    )
    assert captured.same_as(ordinary)
    assert "cannot draw the same random numbers again" in captured.lines[0]


def test_a_capture_that_fails_leaves_an_ordinary_training() -> None:
    """Nothing that was noted speaks against this step; it does something else as soon as it is captured."""

    class Tricky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if torch._C._cuda_isCurrentStreamCapturing():
                torch.cuda.synchronize()
            return y

    def batch(step: int) -> Tensor:
        return torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()

    for strategy in STRATEGIES:
        captured, ordinary = both(
            strategy,
            make_model=lambda: nn.Sequential(nn.Linear(64, 64), Tricky(64, 64)),
            loss=lambda model, x: model(x).square().mean(),
            batch=batch,
            steps=10,
        )
        assert captured.same_as(ordinary), strategy
        assert len(captured.lines) == 1
        assert "torch.cuda.synchronize()" in captured.lines[0]


def test_steps_that_differ_from_their_replay_are_noticed() -> None:
    """A table in Python that nothing here can see: the second graph's first replay is compared, and capturing ends."""
    factor = {"value": [1.0]}

    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * factor["value"][0]

    def change(model: nn.Module, optimizer: Any, step: int) -> None:
        factor["value"][0] = 1.0 + step // 8

    def batch(step: int) -> Tensor:
        return torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()

    found = run(
        Plan(capture="auto"),
        make_model=lambda: Hidden(64, 64),
        loss=lambda model, x: model(x).square().mean(),
        batch=batch,
        between=change,
        steps=16,
    )
    assert "replayed gradients differ" in found.lines[-1]


def test_graphs_share_a_pool_and_the_least_recently_used_goes() -> None:
    sizes = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return gpt_batch(step, size=sizes[(step // 5) % len(sizes)])

    captured, ordinary = both(batch=batch, steps=60)
    assert captured.same_as(ordinary)
    assert torch.cuda.memory_reserved() < 4 * 2**30


def kernels(step: Any) -> list[str]:
    """The names of the kernels of a step, in order of their launch; copies and fills are left out."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = sorted((e for e in profiled.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    return [e.name for e in events if not e.name.startswith(("Memcpy", "Memset", "shardwise_fill", "nccl"))]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_hugging_face_models_run_the_kernels_of_an_ordinary_step(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = {}
    for capture in ("on", "off"):
        torch.manual_seed(0)
        if name == "bert":
            config = transformers.BertConfig(
                vocab_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small
            )
            model = transformers.BertForMaskedLM(config)
        else:
            config = transformers.LlamaConfig(vocab_size=512, num_key_value_heads=2, use_cache=False, **small)
            model = transformers.LlamaForCausalLM(config)
        model = model.cuda().train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(1e-4, device="cuda"), fused=True, capturable=True
        )
        shardwise.prepare(model, optimizer, Plan(precision="bf16", capture=capture))

        def step(ids: Tensor, mask: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        captured = shardwise.capture(step, model, optimizer, tell=lambda line: None)
        ids = tokens(0, size=4, seq=127)
        mask = torch.ones_like(ids)
        for _ in range(6):
            captured(ids, mask)
        found[capture] = kernels(lambda captured=captured, ids=ids, mask=mask: captured(ids, mask))
        if capture == "on":
            assert captured.report.captured
    extra = list(found["on"])
    missing = [name for name in found["off"] if name not in extra or extra.remove(name)]
    assert missing == []
    # What is added: the guards, copies of inputs and results.
    assert all("elementwise" in name or "fill" in name.lower() for name in extra), extra
    assert len(extra) < 16, extra
