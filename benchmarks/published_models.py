"""Models of published measurements that are not in the catalogue, as Tasks for `python:FILE.py:function`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.tasks import Task

VOCABULARY, WIDTH, LENGTH = 33_278, 1024, 35


class Transformer(nn.Module):
    """An encoder and a decoder of 32 layers each, as in Lightning's comparison of strategies: 1 B parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            d_model=WIDTH,
            nhead=64,
            num_encoder_layers=32,
            num_decoder_layers=32,
            dim_feedforward=4 * WIDTH,
            dropout=0.2,
            batch_first=True,
        )
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.full((LENGTH, LENGTH), float("-inf"), device=tokens.device).triu(1)
        source = target = self.embedding(tokens) * math.sqrt(WIDTH)
        logits: Tensor = self.decoder(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))
        return F.log_softmax(logits, dim=-1)


def transformer_1b() -> Task:
    with torch.device("meta"):
        model = Transformer()
    return Task(
        model=model,
        loss=lambda model, batch: F.nll_loss(model(batch).flatten(0, 1), batch.flatten()),
        make_batch=lambda size: torch.zeros(size, LENGTH, dtype=torch.long),
    )
