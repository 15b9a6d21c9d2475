"""The tensors of an output are found wherever models of the field put them."""

import pytest
import torch

from shardwise.engine.hooks.left_tensors import leaves


def test_keys_and_values_of_a_cache_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutputWithPast

    cache = transformers.DynamicCache()
    keys, values = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    cache.update(keys, values, 0)
    logits = torch.ones(2)
    found = leaves(CausalLMOutputWithPast(logits=logits, past_key_values=cache))
    assert len(found) == 3
    assert all(isinstance(leaf, torch.Tensor) for leaf in found)
    assert leaves((logits, transformers.DynamicCache())) == [logits]


def test_an_object_that_may_hide_tensors_is_a_leaf() -> None:
    hidden = object()
    assert leaves([hidden, 1, None])[0] is hidden
