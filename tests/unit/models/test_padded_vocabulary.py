"""A vocabulary in more rows than it has tokens: faster kernels, the same training.

The reference is the same shape with `vocab_multiple=1`. A matrix product over 128 columns adds up in another order
than one over 97, so numbers agree to rounding: in float64 to 1e-12 of each tensor's largest value, after several steps
of AdamW to 1e-9.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint import Checkpoints, open_checkpoint
from shardwise.models.catalogue import CATALOGUE, shape_of
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.models.tasks import classification_sums, cross_entropy, cross_entropy_of_tokens
from shardwise.state.checkpoint.padded_rows import vocabularies

GPT = GPTShape(num_layers=2, width=32, num_heads=2, vocab_size=97, max_seq=16)
LLAMA = LlamaShape(num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=48, vocab_size=97, max_seq=16)
SHAPES = pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
LOSSES = pytest.mark.parametrize("loss_of", [cross_entropy, cross_entropy_of_tokens])


def pair(shape: GPTShape | LlamaShape, *, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """The padded model and the reference, from one seed."""
    models = []
    for one in (shape, replace(shape, vocab_multiple=1)):
        torch.manual_seed(0)
        models.append(build_model(one).to(dtype))
    return models[0], models[1]


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def real(name: str, tensor: Tensor, rows: dict[str, int]) -> Tensor:
    return tensor[: rows[name]] if name in rows else tensor


def assert_near(found: Tensor, expected: Tensor, *, bound: float, what: str) -> None:
    assert found.shape == expected.shape, what
    assert (found - expected).abs().max() <= bound * expected.abs().max(), what


@SHAPES
def test_a_seed_gives_the_weights_of_the_model_without_padding_and_padding_is_0(shape: GPTShape | LlamaShape) -> None:
    padded, reference = pair(shape)
    rows = vocabularies(padded)
    assert set(rows) == {"embed.weight", "head.weight"}
    expected = dict(reference.named_parameters())
    for name, parameter in padded.named_parameters():
        assert torch.equal(real(name, parameter, rows), expected[name])
        if name in rows:
            assert parameter.shape[0] == 128
            assert not parameter[97:].any()


@SHAPES
@LOSSES
def test_loss_and_gradients_are_those_without_padding(shape: GPTShape | LlamaShape, loss_of: object) -> None:
    padded, reference = pair(shape)
    losses = [loss_of(model, batch()) for model in (padded, reference)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-13)
    for loss in losses:
        loss.backward()
    rows, expected = vocabularies(padded), dict(reference.named_parameters())
    for name, parameter in padded.named_parameters():
        assert_near(real(name, parameter.grad, rows), expected[name].grad, bound=1e-12, what=name)
        if name in rows:
            assert not parameter.grad[97:].any()


@SHAPES
@LOSSES
def test_training_is_that_without_padding_and_padding_stays_0(shape: GPTShape | LlamaShape, loss_of: object) -> None:
    padded, reference = pair(shape)
    for model in (padded, reference):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        for step in range(5):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    rows, expected = vocabularies(padded), dict(reference.named_parameters())
    for name, parameter in padded.named_parameters():
        assert_near(real(name, parameter, rows), expected[name], bound=1e-9, what=name)
        if name in rows:
            assert not parameter[97:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_tokens_have_probability_0_and_are_never_the_likeliest(dtype: torch.dtype) -> None:
    padded, reference = pair(GPT, dtype=dtype)
    with torch.no_grad():
        # Logits far below 0, where the 0 of a padded row would win.
        for model in (padded, reference):
            model.norm.weight.zero_()
            model.norm.bias.fill_(10)
            model.embed.weight[:97] = -1.0
        logits = padded(batch()[0])
        assert logits[..., :97].max() < 0
        assert logits.isfinite().all()
        assert logits.argmax(-1).max() < 97
        assert not logits.float().softmax(-1)[..., 97:].any()
        sums, expected = (classification_sums(model, batch()) for model in (padded, reference))
    assert sums["accuracy"] == expected["accuracy"]
    torch.testing.assert_close(sums["loss"], expected["loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", [n for n, s in CATALOGUE.items() if isinstance(s, GPTShape | LlamaShape)])
def test_a_catalogue_model_holds_a_multiple_of_128_rows_or_what_was_published(name: str) -> None:
    shape = shape_of(name)
    assert isinstance(shape, GPTShape | LlamaShape)
    assert shape.vocab_rows % 128 == 0 or (name.startswith("mpt-") and shape.vocab_rows == shape.vocab_size)
    assert 0 <= shape.vocab_rows - shape.vocab_size < 128


def test_a_vocabulary_that_is_a_multiple_of_128_has_no_padding_and_the_same_bits() -> None:
    shape = replace(GPT, vocab_size=256)
    padded, reference = pair(shape, dtype=torch.float32)
    grads = []
    for model in (padded, reference):
        loss = cross_entropy_of_tokens(model, batch())
        loss.backward()
        grads.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@SHAPES
@pytest.mark.parametrize("saved_padded", [True, False])
def test_a_checkpoint_holds_the_vocabulary_alone_and_fills_padded_and_other_models(
    tmp_path: Path, shape: GPTShape | LlamaShape, saved_padded: bool
) -> None:
    torch.manual_seed(0)
    source = build_model(shape if saved_padded else replace(shape, vocab_multiple=1))
    optimizer = torch.optim.AdamW(source.parameters())
    cross_entropy_of_tokens(source, batch()).backward()
    optimizer.step()
    Checkpoints(tmp_path, asynchronous=False).save(source, optimizer, step=1)
    saved = open_checkpoint(tmp_path / "step-00000001")
    assert saved.manifest.contents.parameters["embed.weight"][0] == [97, 32]
    for multiple in (128, 1):
        target = build_model(replace(shape, vocab_multiple=multiple))
        other = torch.optim.AdamW(target.parameters())
        Checkpoints(tmp_path).load(saved, target, other)
        with torch.no_grad():
            wanted, found = (model(batch()[0])[..., :97] for model in (source, target))
        torch.testing.assert_close(found, wanted)
        for one, two in zip(source.parameters(), target.parameters(), strict=True):
            rows = min(len(one), len(two))
            assert torch.equal(one[:rows], two[:rows])
            assert torch.equal(optimizer.state[one]["exp_avg"][:rows], other.state[two]["exp_avg"][:rows])
            assert not two[rows:].any()
            assert not other.state[two]["exp_avg_sq"][rows:].any()
