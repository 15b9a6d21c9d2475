"""What other libraries ask of a model, a prepared one answers."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from training import line
from whole import whole

import shardwise
from shardwise import Plan


def moves(rank: int, strategy: str, precision: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    shardwise.prepare(model, None, Plan(strategy=strategy, precision=precision))
    own = torch.bfloat16 if precision == "bf16" else torch.float32
    assert model.to("cpu") is model
    assert model.cpu() is model
    assert model.to(torch.device("cpu"), non_blocking=True) is model
    if precision == "fp32":
        assert model.to(own) is model
        assert model.float() is model
    for change in (
        lambda: model.double(),
        lambda: model.to(dtype=torch.float16),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.to_empty(device="cpu"),
        lambda: model.share_memory(),
        lambda: model.to("meta"),
    ):
        assert "a prepared model cannot be moved or cast" in line(change)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_move_that_changes_nothing_returns_the_model_and_any_other_is_refused(strategy: str, precision: str) -> None:
    run_ranks(moves, num_ranks=1, args=(strategy, precision))


def make_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, eos_token_id=1
    )
    return transformers.LlamaForCausalLM(config).eval()


def generates(rank: int, strategy: str) -> list[list[int]]:
    model = make_llama()
    if strategy != "one process":
        shardwise.prepare(model, None, Plan(strategy=strategy))
    found = []
    for asked in (0, 1) if strategy == "one process" else (rank,):
        prompt = torch.tensor([[3 + asked, 4, 5]])
        # One rank wants more than the other.
        found.append(model.generate(prompt, do_sample=False, max_new_tokens=4 + 5 * asked, pad_token_id=0)[0].tolist())
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("ddp")])
def test_ranks_generate_sentences_of_different_length(strategy: str) -> None:
    pytest.importorskip("transformers")
    (expected,) = run_ranks(generates, num_ranks=1, args=("one process",))
    found = run_ranks(generates, num_ranks=2, args=(strategy,), timeout_seconds=100.0)
    assert [sentence for (sentence,) in found] == expected


def compiles(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardwise.prepare(model, None, Plan(strategy="fsdp"))
    inputs = torch.ones(2, 4)
    expected = model(inputs)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(inputs), expected)


@pytest.mark.timeout(120)
def test_a_sharded_model_can_be_compiled_as_a_whole() -> None:
    run_ranks(compiles, num_ranks=2, timeout_seconds=100.0)
