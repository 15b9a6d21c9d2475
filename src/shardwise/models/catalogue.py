"""The models that have a name: name → shape, as data. No torch here.

Sources: GPT-2 (Radford et al. 2019), GPT-3's 1.3B row (Brown et al. 2020), MPT (MosaicML llm-foundry),
Llama 2, 3.1 and 3.2 (Meta's config files), ViT (Dosovitskiy et al. 2021; Ti and S from Touvron et al.
2021), ResNet (He et al. 2015). The `-tiny` and `-digits` ones are ours: small enough for a test on a CPU.
"""

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.errors import UnknownName
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, RopeScaling, Shape, ViTShape

_GPT: dict[str, Shape] = {
    "gpt-tiny": GPTShape(num_layers=4, width=128, num_heads=4, vocab_size=256, max_seq=128),
    "gpt2-124m": GPTShape(num_layers=12, width=768, num_heads=12),
    "gpt2-350m": GPTShape(num_layers=24, width=1024, num_heads=16),
    "gpt2-774m": GPTShape(num_layers=36, width=1280, num_heads=20),
    "gpt2-1.5b": GPTShape(num_layers=48, width=1600, num_heads=25),
    "gpt-1.3b": GPTShape(num_layers=24, width=2048, num_heads=16, max_seq=2048),
}

_MPT: dict[str, Shape] = {
    # llm-foundry has rounded the vocabulary up to a multiple of 64, and that is what was measured.
    f"mpt-{size}": GPTShape(
        num_layers=layers, width=width, num_heads=heads, vocab_size=50368, max_seq=2048, vocab_multiple=64
    )
    for size, layers, width, heads in (
        ("125m", 12, 768, 12),
        ("350m", 24, 1024, 16),
        ("760m", 24, 1536, 12),
        ("1b", 24, 2048, 16),
        ("3b", 32, 2560, 20),
        ("7b", 32, 4096, 32),
        ("13b", 40, 5120, 40),
        ("30b", 48, 7168, 56),
        ("70b", 80, 8192, 64),
    )
}


def _llama2(*, num_layers: int, width: int, num_heads: int, num_kv_heads: int, ffn_width: int) -> LlamaShape:
    return LlamaShape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_width=ffn_width,
        vocab_size=32_000,
        max_seq=4096,
    )


def _llama3(
    *,
    num_layers: int,
    width: int,
    num_heads: int,
    ffn_width: int,
    rope_factor: float = 8.0,
    tied: bool = False,
) -> LlamaShape:
    return LlamaShape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_width=ffn_width,
        vocab_size=128_256,
        # What it was first trained on; rotary positions go on to 131,072.
        max_seq=8192,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=rope_factor),
        tied=tied,
    )


_LLAMA: dict[str, Shape] = {
    "llama-tiny": LlamaShape(
        num_layers=4, width=128, num_heads=4, num_kv_heads=2, ffn_width=384, vocab_size=256, max_seq=128
    ),
    "llama-2-7b": _llama2(num_layers=32, width=4096, num_heads=32, num_kv_heads=32, ffn_width=11_008),
    "llama-2-13b": _llama2(num_layers=40, width=5120, num_heads=40, num_kv_heads=40, ffn_width=13_824),
    "llama-2-70b": _llama2(num_layers=80, width=8192, num_heads=64, num_kv_heads=8, ffn_width=28_672),
    "llama-3.2-1b": _llama3(num_layers=16, width=2048, num_heads=32, ffn_width=8192, rope_factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(num_layers=32, width=4096, num_heads=32, ffn_width=14_336),
    "llama-3.1-70b": _llama3(num_layers=80, width=8192, num_heads=64, ffn_width=28_672),
    "llama-3.1-405b": _llama3(num_layers=126, width=16_384, num_heads=128, ffn_width=53_248),
}

_VIT: dict[str, Shape] = {
    "vit-digits": ViTShape(
        num_layers=4, width=64, num_heads=4, image_size=8, patch_size=2, num_channels=1, num_classes=10
    ),
    "vit-tiny": ViTShape(num_layers=12, width=192, num_heads=3),
    "vit-small": ViTShape(num_layers=12, width=384, num_heads=6),
    "vit-base": ViTShape(num_layers=12, width=768, num_heads=12),
    "vit-large": ViTShape(num_layers=24, width=1024, num_heads=16),
    "vit-huge": ViTShape(num_layers=32, width=1280, num_heads=16, patch_size=14),
}

_RESNET: dict[str, Shape] = {
    "resnet-digits": ResNetShape(
        block="basic",
        num_blocks=(1, 1, 1, 1),
        width=16,
        image_size=8,
        num_channels=1,
        num_classes=10,
        small_images=True,
    ),
    "resnet18": ResNetShape(block="basic", num_blocks=(2, 2, 2, 2)),
    "resnet34": ResNetShape(block="basic", num_blocks=(3, 4, 6, 3)),
    "resnet50": ResNetShape(block="bottleneck", num_blocks=(3, 4, 6, 3)),
}

CATALOGUE: Mapping[str, Shape] = MappingProxyType({**_GPT, **_MPT, **_LLAMA, **_VIT, **_RESNET})


def shape_of(name: str) -> Shape:
    """The shape of a catalogue model."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownName.of("model", name, known=CATALOGUE, see="`shardwise models` lists them all") from None
