"""The lean loss is cross-entropy, and its gradient is cross-entropy's, where the logits were."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.base.errors import InvalidModel
from shardwise.models.own.lean_loss import lean_cross_entropy
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy, load_task, token_task

SHAPE = GPTShape(num_layers=2, width=32, num_heads=2, vocab_size=97, max_seq=16)


def logits_of(num_rows: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_rows)
    return torch.randn(num_rows, 11, dtype=torch.float64).to(dtype), torch.randint(11, (num_rows,))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 37, 64])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)]
)
def test_value_and_gradient_are_those_of_cross_entropy(num_rows: int, dtype: torch.dtype, tolerance: float) -> None:
    logits, targets = logits_of(num_rows, dtype=dtype)
    usual, lean = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(usual.to(torch.promote_types(dtype, torch.float32)), targets)
    (3 * expected).backward()
    loss = lean_cross_entropy(lean * 1, targets)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(lean.grad, usual.grad, rtol=tolerance, atol=tolerance)


def test_the_gradient_lies_where_the_logits_were() -> None:
    logits, targets = logits_of(16, dtype=torch.float32)
    logits.requires_grad_()
    made = logits * 1
    seen: list[Tensor] = []
    made.register_hook(seen.append)
    lean_cross_entropy(made, targets).backward()
    assert seen[0].data_ptr() == made.data_ptr()


def test_without_gradients_the_logits_stay() -> None:
    logits, targets = logits_of(16, dtype=torch.float32)
    before = logits.clone()
    assert lean_cross_entropy(logits, targets).item() == F.cross_entropy(logits, targets).item()
    with torch.no_grad():
        lean_cross_entropy(logits.requires_grad_(), targets)
    assert torch.equal(logits, before)


def test_a_second_backward_is_refused() -> None:
    logits, targets = logits_of(16, dtype=torch.float32)
    loss = lean_cross_entropy(logits.requires_grad_() * 1, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidModel, match="a second backward through a lean loss"):
        loss.backward()


def test_a_model_trains_the_same_with_either() -> None:
    torch.manual_seed(0)
    task = token_task(SHAPE)
    batch = task.make_batch(3)
    grads = []
    for loss in (cross_entropy, load_task("mpt-125m", device="meta").loss):
        task.model.zero_grad()
        loss(task.model, batch).backward()
        grads.append([parameter.grad.clone() for parameter in task.model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
