"""Tiny models of families that the catalogue does not have, each as a Task: how much memory they take is predicted."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.tasks import Task

BATCH = 4


def _hugging_face(kind: str, config: str, batch: Callable[[int], dict[str, Tensor]], **values: Any) -> Task:
    """A model of transformers with its own loss, and weights as they come."""
    transformers = __import__("transformers")
    model = getattr(transformers, kind)(getattr(transformers, config)(**values))
    model.config.use_cache = False
    return Task(model=model.train(), loss=lambda model, batch: model(**batch).loss, make_batch=batch)


def _tokens(size: int, *, length: int = 16) -> Tensor:
    return torch.arange(size * length).reshape(size, length) % 50 + 3


def _labelled(name: str, *shape: int) -> Callable[[int], dict[str, Tensor]]:
    """Inputs of a shape, and a class for each."""
    return lambda size: {name: torch.ones(size, *shape), "labels": torch.arange(size) % 2}


def t5() -> Task:
    return _hugging_face(
        "T5ForConditionalGeneration", "T5Config", lambda size: {"input_ids": _tokens(size), "labels": _tokens(size)},
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip


def mixtral() -> Task:
    return _hugging_face(
        "MixtralForCausalLM", "MixtralConfig", lambda size: {"input_ids": _tokens(size), "labels": _tokens(size)},
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        experts_implementation="batched_mm",
    )  # fmt: skip


def swin() -> Task:
    return _hugging_face(
        "SwinForImageClassification", "SwinConfig", _labelled("pixel_values", 3, 32, 32),
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=2,
        drop_path_rate=0.0,
    )  # fmt: skip


def whisper() -> Task:
    def batch(size: int) -> dict[str, Tensor]:
        return {"input_features": torch.ones(size, 8, 32), "labels": _tokens(size)}

    return _hugging_face(
        "WhisperForConditionalGeneration", "WhisperConfig", batch,
        vocab_size=64, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16,
        max_target_positions=32, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip


def wav2vec2() -> Task:
    return _hugging_face(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _labelled("input_values", 800),
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=[16, 16],
        conv_stride=[5, 4], conv_kernel=[10, 8], num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, apply_spec_augment=False, num_labels=2, classifier_proj_size=16,
    )  # fmt: skip


def mamba() -> Task:
    return _hugging_face(
        "MambaForCausalLM", "MambaConfig", lambda size: {"input_ids": _tokens(size), "labels": _tokens(size)},
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, use_mambapy=False,
    )  # fmt: skip


class _DitBlock(nn.Module):
    """A transformer block whose norms are shifted and scaled by what the image is conditioned on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        heads = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(attended)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class _Dit(nn.Module):
    """Predicts the noise in patches of an image."""

    def __init__(self, *, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(3, width, 4, stride=4), nn.Linear(1, width)
        self.blocks = nn.ModuleList(_DitBlock(width) for _ in range(depth))
        self.out = nn.Linear(width, 3 * 16)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        x, condition = self.patches(images).flatten(2).transpose(1, 2), self.time(times[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return F.pixel_shuffle(self.out(x).transpose(1, 2).unflatten(2, (4, 4)), 4)


class _UnetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(1, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.time(times[:, None])[..., None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(inner)))


class _Unet(nn.Module):
    """Down and up again, with what each level knew on the way down."""

    def __init__(self, *, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList([_UnetBlock(width, width), _UnetBlock(width, 2 * width)])
        self.middle = _UnetBlock(2 * width, 2 * width)
        self.up = nn.ModuleList([_UnetBlock(4 * width, width), _UnetBlock(2 * width, width)])

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        x, levels = self.first(images), []
        for block in self.down:
            x = block(x, times)
            levels.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, times)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), levels.pop()], dim=1), times)
        return self.last(x)


def _diffusion(model: nn.Module) -> Task:
    """The noise is what the model is to find."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, noise = batch
        return F.mse_loss(model(images + noise, noise[:, 0, 0, 0]), noise)

    return Task(
        model=model, loss=loss, make_batch=lambda size: (torch.zeros(size, 3, 16, 16), torch.ones(size, 3, 16, 16))
    )


def dit() -> Task:
    return _diffusion(_Dit())


def unet() -> Task:
    return _diffusion(_Unet())


ARCHITECTURES: dict[str, Callable[[], Task]] = {
    "t5": t5,
    "mixtral": mixtral,
    "unet": unet,
    "swin": swin,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
    "mamba": mamba,
    "dit": dit,
}
