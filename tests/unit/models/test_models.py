import pytest
import torch

from shardwise.base.errors import InvalidModel
from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, ViTShape


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_token_does_not_see_what_comes_after_it(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(shape_of(name)).eval()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_sample_that_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(InvalidModel, match="129 tokens per sample"):
        build_model(shape_of(name))(torch.zeros(1, 129, dtype=torch.int64))


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vit-digits", "resnet-digits"])
def test_the_first_loss_is_that_of_a_guess(name: str) -> None:
    """Fresh logits are small, so the loss starts near log(number of answers)."""
    from shardwise.models.tasks import load_task

    torch.manual_seed(0)
    task = load_task(name)
    loss = task.loss(task.model, task.make_batch(16))
    answers = task.model(task.make_batch(2)[0]).shape[-1]
    assert loss.item() == pytest.approx(torch.tensor(answers).log().item(), rel=0.2)


def test_dropout_works_in_training_only() -> None:
    torch.manual_seed(0)
    shape = GPTShape(num_layers=2, width=32, num_heads=2, vocab_size=50, max_seq=16, dropout=0.5)
    model = build_model(shape)
    tokens = torch.randint(50, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_an_image_that_patches_do_not_cover_is_refused() -> None:
    with pytest.raises(InvalidModel, match="30 pixels cannot be cut into patches of 16"):
        build_model(ViTShape(num_layers=1, width=8, num_heads=1, image_size=30))
