"""A language model with the lean loss trains as with transformers' own, and its logits stay."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import InvalidModel
from shardwise.doors.integrations.lean_causal_loss import LeanCausalLoss
from shardwise.engine.activations.tiled import tile_modules

transformers = pytest.importorskip("transformers")


def make_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=61))


def tokens(num_ignored: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :num_ignored] = -100
    return ids, labels


@pytest.mark.parametrize("num_ignored", [0, 5])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 40}, {"num_items_in_batch": torch.tensor(40)}])
def test_loss_and_gradients_are_those_of_transformers(num_ignored: int, options: dict[str, Any]) -> None:
    usual = make_llama()
    lean = copy.deepcopy(usual)
    shardwise.lean_loss(lean)
    ids, labels = tokens(num_ignored)
    found = [model(input_ids=ids, labels=labels, **options) for model in (usual, lean)]
    assert torch.equal(found[0].logits, found[1].logits)
    torch.testing.assert_close(found[1].loss, found[0].loss)
    for one in found:
        (2 * one.loss).backward()
    for (name, parameter), other in zip(usual.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)


def test_labels_may_come_shifted() -> None:
    ids, labels = tokens(2)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    model = make_llama()
    expected = model(input_ids=ids, labels=labels).loss
    shardwise.lean_loss(model)
    torch.testing.assert_close(model(input_ids=ids, labels=labels, shift_labels=shifted).loss, expected)


def test_without_gradients_it_is_the_usual_loss() -> None:
    model, (ids, labels) = make_llama(), tokens(3)
    with torch.no_grad():
        expected = model(input_ids=ids, labels=labels).loss
        shardwise.lean_loss(model)
        assert torch.equal(model(input_ids=ids, labels=labels).loss, expected)


def test_a_second_call_changes_nothing_and_the_model_can_be_pickled() -> None:
    model = make_llama()
    shardwise.lean_loss(model)
    first = model.loss_function
    shardwise.lean_loss(model)
    assert model.loss_function is first
    assert isinstance(pickle.loads(pickle.dumps(model)).loss_function, LeanCausalLoss)


def test_a_model_without_such_a_loss_is_refused() -> None:
    with pytest.raises(InvalidModel, match="Linear has no causal language model of transformers inside"):
        shardwise.lean_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("is_lean", [False, True])
def test_a_head_in_tiles_has_the_loss_and_the_gradients_of_transformers(is_lean: bool) -> None:
    usual = make_llama()
    tiled = copy.deepcopy(usual)
    if is_lean:
        shardwise.lean_loss(tiled)
    tile_modules(tiled, tile={"lm_head": 2, "*.mlp": 4})
    ids, labels = tokens(5)
    found = [model(input_ids=ids, labels=labels) for model in (usual, tiled)]
    torch.testing.assert_close(found[1].loss, found[0].loss)
    for one in found:
        one.loss.backward()
    for (name, parameter), other in zip(usual.named_parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)
    # A trainer that looks at the logits finds them.
    assert torch.equal(found[1].logits.argmax(-1), found[0].logits.argmax(-1))
