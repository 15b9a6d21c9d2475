"""What the pieces share in which the gradients of one flat buffer are reduced."""

from torch import Tensor, nn

from shardwise.engine.core.flat_buffers import unguarded


class SharedGrads:
    """Autograd's gradients until the last piece has copied its part of them, and the average that the pieces bring."""

    def __init__(self) -> None:
        self.own: list[Tensor | None] | None = None
        self.average: Tensor | None = None

    def take(self, params: list[nn.Parameter], *, is_last: bool) -> list[Tensor | None]:
        """Return this rank's gradients, each as one row; the first piece takes them off the parameters."""
        own = self.own
        if own is None:
            given = take_off(params)
            own = [
                None if grad is None else (grad.to_dense() if grad.is_sparse else grad).reshape(-1) for grad in given
            ]
        self.own = None if is_last else own
        return own

    def clear(self) -> None:
        self.own = self.average = None

    def tensors(self) -> list[Tensor]:
        """Return autograd's gradients that are not copied yet."""
        return [grad for grad in self.own or () if grad is not None]


def take_off(params: list[nn.Parameter]) -> list[Tensor | None]:
    """Return what autograd has left at the parameters, and leave nothing there."""
    with unguarded():
        given = [parameter.grad for parameter in params]
        for parameter in params:
            parameter.grad = None
    return given
