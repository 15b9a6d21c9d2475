"""Small networks of the kinds that people train; importable by ranks."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A stack of blocks between two linear layers."""

    def __init__(self, *, outputs: int = 3, num_blocks: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, outputs)
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        return self.head(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


class TiedNet(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self, *, sparse: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 24, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def continued(self, tokens: Tensor, *, length: int) -> Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: Net) -> list[nn.Parameter]:
    """Freeze the model and put adapters into its blocks; what is trained."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = Adapter(block.up)  # type: ignore[assignment]
    return [p for p in model.parameters() if p.requires_grad]


class Experts(nn.Module):
    """A mixture: each sample goes to one of four experts, so that a rank may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        parts = [(chosen == number).nonzero()[:, 0] for number in range(4)]
        y = torch.zeros_like(x)
        for number, rows in enumerate(parts):
            if len(rows):
                y = y.index_add(0, rows, self.experts[number](x[rows]) * weights[rows, number : number + 1])
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])


class UNet(nn.Module):
    """Down, up, and a skip between them; the time of a diffusion comes in at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.time = nn.Linear(1, 8)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(len(x), 1, 4, 4)
        first = torch.relu(self.into(image))
        deep = self.down(first) + self.time(x.mean(1, keepdim=True))[:, :, None, None]
        return self.out(torch.cat([first, self.up(torch.relu(deep))], dim=1))


class DiffusionBlock(nn.Module):
    """Attention and a network whose norms are scaled by what is said of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, other = self.modulation(time).unsqueeze(1).chunk(4, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y, need_weights=False)[0]
        return x + other * self.network(self.norm(x))


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.patch = nn.Linear(1, WIDTH), nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x.mean(1, keepdim=True))
        y = self.patch(x.view(len(x), 4, 4))
        for block in self.blocks:
            y = block(y, time)
        return self.head(y)


class Spectral(nn.Module):
    """Complex parameters between a Fourier transform and back."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = Net(outputs=WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.actor(x), self.critic(x)


class OnShared(nn.Module):
    """A head of its own on an encoder that another model has too."""

    def __init__(self, encoder: nn.Module, *, outputs: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))
