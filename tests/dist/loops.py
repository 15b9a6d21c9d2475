"""Loops of all kinds around one small model, for tests of units as graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise

WIDTH = 8


class Block(nn.Module):
    """Attention and a product, with a table that all blocks are given, and a mask or none."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.scale = 1.0

    def forward(self, x: Tensor, *, table: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = q * table[0], k * table[1]
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        return x + self.dropout(self.out(scores.softmax(-1) @ v))


class Model(nn.Module):
    """Blocks, with one that skips to a later one, as in a U-Net."""

    def __init__(self, *, num_blocks: int = 4, skips: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 16)
        self.skips = skips
        # Tells the device.
        self.register_buffer("here", torch.zeros(1))
        self.kept: list[Tensor] = []
        self.keeps = False

    def forward(self, tokens: Tensor, *, masked: bool = False) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        angles = torch.arange(length, dtype=x.dtype, device=x.device)[:, None] * torch.ones_like(x[0, 0])
        table = (angles.cos(), angles.sin())
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1) if masked else None
        first = None
        for number, block in enumerate(self.blocks):
            if self.skips and number == len(self.blocks) - 1:
                x = x + first
            x = block(x, table=table, mask=mask)
            first = x if first is None else first
            if self.keeps:
                self.kept.append(x)
        return self.head(x)


def batch(step: int, *, rank: int, length: int = 6) -> Tensor:
    return torch.randint(0, 16, (2, length), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, tokens: Tensor, *, masked: bool = False) -> Tensor:
    tokens = tokens.to(next(model.buffers()).device)
    return nn.functional.cross_entropy(model(tokens, masked=masked).flatten(0, 1), tokens.flatten())


def plain(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    for step in range(9):
        loss = loss_of(model, batch(step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.detach())


def lengths(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    """Three lengths and masks in turn; evaluations between the steps."""
    for step in range(40):
        tokens = batch(step, rank=rank, length=(6, 3, 8)[step % 3])
        loss = loss_of(model, tokens, masked=step % 2 == 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            said += [loss.detach(), model(tokens.to(model.here.device))]
            model.train()


def accumulated(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    for step in range(6):
        for part in range(3):
            with shardwise.accumulate(model, enabled=part < 2):
                loss = loss_of(model, batch(10 * step + part, rank=rank))
                loss.backward()
            said.append(loss.detach())
        said.append(shardwise.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()


def two_forwards(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    for step in range(14):
        first = loss_of(model, batch(2 * step, rank=rank))
        # A backward that recomputes draws the numbers of its forward again, whatever was seeded in between.
        torch.manual_seed(10 * step + rank)
        loss = first + loss_of(model, batch(2 * step + 1, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.detach())


def kept_graph(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    """Two backwards through one forward, now and then."""
    for step in range(14):
        logits = model(batch(step, rank=rank).to(model.here.device))
        if step % 5 == 4:
            logits.square().mean().backward(retain_graph=True)
        logits.exp().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(logits.detach().clone())


def dropped(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    """Forwards that train and have no backward; outputs that are kept across steps; attributes that change."""
    for step in range(20):
        model.keeps = step in (9, 10)
        if step % 4 == 1:
            said.append(loss_of(model, batch(100 + step, rank=rank)).detach())
        model.blocks[1].scale = 0.5 if step == 15 else 1.0
        loss = loss_of(model, batch(step, rank=rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.detach())
    said += [tensor.detach() for tensor in model.kept]


def kept_gradients(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    """Gradients that are still there when a later forward begins, after steps in which they were not."""
    for step in range(22):
        loss = loss_of(model, batch(step, rank=rank))
        loss.backward()
        said.append(loss.detach())
        if step == 18:
            with torch.no_grad():
                said.append(model(batch(step, rank=rank).to(model.here.device)))
        if step not in (9, 10):
            optimizer.step()
            optimizer.zero_grad()


def looked_at(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    """Hooks that look at gradients on their way, on parameters and on nodes, of blocks in turn; now and then none."""
    for step in range(14):
        parameter = model.blocks[step % 3].out.weight
        seen: list[Tensor] = []
        loss = loss_of(model, batch(step, rank=rank))
        handles = []
        if step % 4 == 1:
            handles.append(parameter.register_hook(lambda grad, seen=seen: seen.append(grad.clone())))
        elif step % 4 == 2:
            look = lambda one, seen=seen: seen.append(one.grad.clone())  # noqa: E731
            handles.append(parameter.register_post_accumulate_grad_hook(look))
        elif step % 4 == 3:
            with torch._C.DisableTorchFunctionSubclass():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            handles.append(node.register_prehook(lambda grads, seen=seen: seen.append(grads[0].clone())))
        loss.backward()
        assert len(seen) == len(handles)
        for handle in handles:
            handle.remove()
        said += seen
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.detach())


def penalised(model: Any, optimizer: Any, *, rank: int, said: list[Any]) -> None:
    """A loss that uses parameters of blocks too, now and then. They must be whole on every rank."""
    for step in range(14):
        loss = loss_of(model, batch(step, rank=rank))
        if step % 3 == 2:
            loss = loss + sum(block.out.weight.square().sum() for block in model.blocks[:2])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.detach())


LOOPS: dict[str, Callable[..., None]] = {
    loop.__name__: loop
    for loop in (plain, lengths, accumulated, two_forwards, kept_graph, kept_gradients, dropped, looked_at)
}
