"""What an observed pass says about the memory of its graphs."""

import pytest

from shardwise.engine.graphs.arena import ObservedMemory


@pytest.mark.parametrize(
    ("activations", "loss", "gradients", "places", "pass_bytes"),
    [
        # They take the place of activations; and room for the temporaries of one of two units.
        (40, 10, 30, True, 40 + 20),
        (40, 10, 60, True, 60 + 20),
        # Ordinary memory has room that the loss has left.
        (10, 40, 60, False, 10 + 5),
        # More than all of the gradients need.
        (20, 40, 10, True, 20 + 10),
        # No loss outside of the units.
        (0, 0, 30, True, 30),
    ],
)
def test_gradients_lie_in_the_memory_of_graphs_unless_the_loss_leaves_more(
    activations: int, loss: int, gradients: int, places: bool, pass_bytes: int
) -> None:
    observed = ObservedMemory(begin_bytes=100)
    for _ in range(2):
        observed.add_call(activations // 2)
    observed.begin_backward(100 + activations + loss)
    observed.gradient_bytes += gradients
    assert (observed.places_gradients, observed.pass_bytes) == (places, pass_bytes)
