"""What other libraries ask of a model, a prepared one answers."""

from typing import Any

import pytest
import torch
from ranks import preload, run_ranks
from torch import nn
from training import line
from whole import whole

import shardwise
from shardwise import Plan

preload("transformers.models.llama.modeling_llama")


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
@pytest.mark.parametrize("strategy", whole("fsdp", "ddp"))
def test_ranks_generate_sentences_of_different_length(strategy: str) -> None:
    pytest.importorskip("transformers")
    (expected,) = run_ranks(generates, num_ranks=1, args=("one process",))
    found = run_ranks(generates, num_ranks=2, args=(strategy,), timeout_seconds=100.0)
    assert [sentence for (sentence,) in found] == expected


class Adapted(nn.Module):
    """As LoRA's wrapper does it: the model inside generates, and the prepared model's own forward is not called."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.base(*arguments, **options)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        return self.base.generate(*arguments, **options)


def make_generator(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "adapted":
        return Adapted(make_llama())
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
    if kind == "t5":
        config = transformers.T5Config(num_layers=2, num_heads=2, d_kv=8, d_ff=32, eos_token_id=1, **sizes)
        return transformers.T5ForConditionalGeneration(config).eval()
    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(encoder_ffn_dim=32, decoder_ffn_dim=32, eos_token_id=2, **layers, **sizes)
    return transformers.BartForConditionalGeneration(config).eval()


def generates_inside(rank: int, kind: str, strategy: str) -> list[list[int]]:
    model = make_generator(kind)
    if strategy != "one process":
        shardwise.prepare(model, None, Plan(strategy=strategy))
    found = []
    for asked in (0, 1) if strategy == "one process" else (rank,):
        prompt = torch.tensor([[3 + asked, 4, 5]])
        for num_beams in (1, 2):
            options = {"do_sample": False, "num_beams": num_beams, "max_new_tokens": 4 + 5 * asked, "pad_token_id": 0}
            found.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist())
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "strategy"), [("t5", "fsdp"), ("adapted", "fsdp"), *whole(("bart", "fsdp"), ("t5", "shard_grad_op"))]
)
def test_models_generate_whose_inside_is_called_without_their_own_forward(kind: str, strategy: str) -> None:
    pytest.importorskip("transformers")
    (expected,) = run_ranks(generates_inside, num_ranks=1, args=(kind, "one process"))
    found = run_ranks(generates_inside, num_ranks=2, args=(kind, strategy), timeout_seconds=100.0)
    assert [sentence for sentences in found for sentence in sentences] == expected


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(8, 4)
        self.encoder = nn.ModuleDict({"embed": self.shared, "blocks": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder["blocks"](self.shared(tokens)))


def called_inside(rank: int, strategy: str) -> None:
    model, tokens = EncoderDecoder(), torch.tensor([[1, 2 + rank]])
    with torch.no_grad():
        expected = [model.shared(tokens), model.head(torch.ones(2, 4)), model(tokens)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(strategy=strategy, units="none + encoder.blocks.0 + encoder.blocks.1")
    shardwise.prepare(model, optimizer, plan)
    with torch.no_grad():
        found = [model.shared(tokens), model.head(torch.ones(2, 4)), model(tokens)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # It is freed again, also after an error.
    with pytest.raises(RuntimeError), torch.no_grad():
        model.head(torch.ones(2, 5))
    assert "is sharded and freed" in line(lambda: model.head[1].weight.sum())
    assert "is sharded and freed" in line(lambda: model.head(torch.ones(2, 4)))
    model(tokens).sum().backward()
    optimizer.step()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["fsdp", *whole("shard_grad_op")])
def test_modules_outside_of_units_may_be_called_by_themselves_without_gradients(strategy: str) -> None:
    run_ranks(called_inside, num_ranks=2, args=(strategy,))


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
