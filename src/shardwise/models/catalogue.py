"""The catalogue: name → shape, as data. No torch here.

Sources: GPT-2 (Radford et al. 2019), GPT-3's 1.3B row (Brown et al. 2020), MPT (MosaicML llm-foundry),
Llama 2, 3.1 and 3.2 (Meta's config files), Mistral 7B v0.3 and SmolLM2 (Llamas by their config files), ViT
(Dosovitskiy et al. 2021; Ti and S from Touvron et al. 2021), ResNet (He et al. 2015); other families are in
transformers_shapes.py. The `-tiny` and `-digits` models are ours: small enough for a test on a CPU.
"""

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.errors import UnknownName
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, RopeScaling, Shape, ViTShape
from shardwise.models.transformers_shapes import TRANSFORMERS_SHAPES

_GPT: dict[str, Shape] = {
    "gpt-tiny": GPTShape(num_layers=4, width=128, num_heads=4, vocab_size=256, max_seq=128),
    "gpt2-124m": GPTShape(num_layers=12, width=768, num_heads=12),
    "gpt2-350m": GPTShape(num_layers=24, width=1024, num_heads=16),
    "gpt2-774m": GPTShape(num_layers=36, width=1280, num_heads=20),
    "gpt2-1.5b": GPTShape(num_layers=48, width=1600, num_heads=25),
    "gpt-1.3b": GPTShape(num_layers=24, width=2048, num_heads=16, max_seq=2048),
}

_MPT: dict[str, Shape] = {
    # The measured models of llm-foundry have a vocabulary that is rounded up to a multiple of 64.
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

_LLAMA_TINY = LlamaShape(
    num_layers=4, width=128, num_heads=4, num_kv_heads=2, ffn_width=384, vocab_size=256, max_seq=128
)
_LLAMA_2: dict[str, Shape] = {
    f"llama-2-{size}": LlamaShape(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_width=ffn_width,
        vocab_size=32_000,
        max_seq=4096,
    )
    for size, layers, width, heads, kv_heads, ffn_width in (
        ("7b", 32, 4096, 32, 32, 11_008),
        ("13b", 40, 5120, 40, 40, 13_824),
        ("70b", 80, 8192, 64, 8, 28_672),
    )
}
_LLAMA_3: dict[str, Shape] = {
    f"llama-{size}": LlamaShape(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=8,
        ffn_width=ffn_width,
        vocab_size=128_256,
        # The length of the first training phase; rotary positions work up to 131,072.
        max_seq=8192,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=rope_factor),
        tied=size.startswith("3.2"),
    )
    for size, layers, width, heads, ffn_width, rope_factor in (
        ("3.2-1b", 16, 2048, 32, 8192, 32.0),
        ("3.2-3b", 28, 3072, 24, 8192, 32.0),
        ("3.1-8b", 32, 4096, 32, 14_336, 8.0),
        ("3.1-70b", 80, 8192, 64, 28_672, 8.0),
        ("3.1-405b", 126, 16_384, 128, 53_248, 8.0),
    )
}

_MISTRAL_7B = LlamaShape(
    num_layers=32,
    width=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_width=14_336,
    vocab_size=32_768,
    max_seq=8192,
    rope_theta=1e6,
)
_SMOLLM2: dict[str, Shape] = {
    f"smollm2-{size}": LlamaShape(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_width=ffn_width,
        vocab_size=49_152,
        max_seq=2048,
        rope_theta=theta,
        tied=True,
    )
    for size, layers, width, heads, kv_heads, ffn_width, theta in (
        ("135m", 30, 576, 9, 3, 1536, 1e5),
        ("360m", 32, 960, 15, 5, 2560, 1e5),
        ("1.7b", 24, 2048, 32, 32, 8192, 1.3e5),
    )
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

CATALOGUE: Mapping[str, Shape] = MappingProxyType(
    {
        **_GPT,
        **_MPT,
        "llama-tiny": _LLAMA_TINY,
        **_LLAMA_2,
        **_LLAMA_3,
        "mistral-7b": _MISTRAL_7B,
        **_SMOLLM2,
        **TRANSFORMERS_SHAPES,
        **_VIT,
        **_RESNET,
    }
)


KINDS = ("params", "python", "hf", "timm", "torchvision")
"""What stands before the colon of models that are not in the catalogue."""


def shape_of(name: str) -> Shape:
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownName.of("model", name, known=CATALOGUE, see="`shardwise models` lists them all") from None


def kind_of(reference: str) -> tuple[str, str]:
    """Split a MODEL into its kind, one of KINDS, and its name; a name of the catalogue has the kind ""."""
    kind, colon, name = reference.partition(":")
    return (kind, name) if colon and kind in KINDS else ("", reference)
