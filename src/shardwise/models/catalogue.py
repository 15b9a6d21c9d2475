"""The catalogue: name → shape, as data. No torch here.

Sources: GPT-2 (Radford et al. 2019), GPT-3's 1.3B row (Brown et al. 2020), MPT (MosaicML llm-foundry),
Llama 2, 3.1 and 3.2 (Meta's config files), Mistral 7B v0.3 and SmolLM2 (Llamas by their config files), ViT
(Dosovitskiy et al. 2021; Ti and S from Touvron et al. 2021), ResNet (He et al. 2015). The `-tiny` and `-digits` models
are ours: small enough for a test on a CPU.

Other families are models of the transformers library, by the values of their config.json. Sources: the config files
that Qwen (Qwen3), Mistral AI (Nemo, Small 3), Google (Gemma 3, the language model alone), Ai2 (OLMo 2), Microsoft
(Phi-4), Hugging Face (SmolLM3) and Answer.AI (ModernBERT) published. Rotary scaling for long contexts is left out: it
changes no cost. A checkpoint of such a model is trained as `hf:DIR`. All have the number of parameters of the published
checkpoint, to the last one (tests/unit/models/test_shapes.py has the sources); gemma-3-4b and -12b, olmo-2-1b and
smollm3-3b were also compared with copies of their config files, number by number.
"""

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.base.errors import UnknownName
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, RopeScaling, Shape, TransformersShape, ViTShape

# The sample length that commands take unless --seq says otherwise, not the longest that a model can read.
_SEQ = 4096
_MOST_BY_DEFAULT = 2048


def default_seq(longest: int | None) -> int:
    """Return the tokens per sample of a config unless asked otherwise: those that it can read, up to 2,048."""
    return min(_MOST_BY_DEFAULT, longest or _MOST_BY_DEFAULT)


def _shape(
    kind: str, num_params: int, layers: int, width: int, ffn: int, heads: int, *, seq: int = _SEQ, **others: object
) -> TransformersShape:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": ffn, "num_attention_heads": heads}
    return TransformersShape(model_type=kind, num_params=num_params, max_seq=seq, config={**sizes, **others})


# fmt: off
_QWEN3 = {
    f"qwen3-{size}": _shape(
        "qwen3", num_params, layers, width, ffn, heads,
        num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    for size, num_params, layers, width, ffn, heads, tied in (
        ("0.6b", 596_049_920, 28, 1024, 3072, 16, True),
        ("1.7b", 1_720_574_976, 28, 2048, 6144, 16, True),
        ("4b", 4_022_468_096, 36, 2560, 9728, 32, True),
        ("8b", 8_190_735_360, 36, 4096, 12_288, 32, False),
        ("14b", 14_768_307_200, 40, 5120, 17_408, 40, False),
        ("32b", 32_762_123_264, 64, 5120, 25_600, 64, False),
    )
}
_QWEN3_MOE = {
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", 30_532_122_624, 48, 2048, 6144, 32,
        num_key_value_heads=4, head_dim=128, vocab_size=151_936, tie_word_embeddings=False,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
}
_MISTRAL = {
    name: _shape(
        "mistral", num_params, 40, 5120, ffn, 32,
        num_key_value_heads=8, head_dim=128, vocab_size=131_072, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    for name, num_params, ffn, theta in (
        ("mistral-nemo-12b", 12_247_782_400, 14_336, 1e6),
        ("mistral-small-24b", 23_572_403_200, 32_768, 1e8),
    )
}
_GEMMA3 = {
    f"gemma-3-{size}": _shape(
        "gemma3_text", num_params, layers, width, ffn, heads,
        num_key_value_heads=kv_heads, head_dim=head, sliding_window=window, query_pre_attn_scalar=scalar,
        vocab_size=vocab_size,
    )
    for size, num_params, layers, width, ffn, heads, kv_heads, head, window, scalar, vocab_size in (
        ("270m", 268_098_176, 18, 640, 2048, 4, 1, 256, 512, 256, 262_144),
        ("1b", 999_885_952, 26, 1152, 6912, 4, 1, 256, 512, 256, 262_144),
        ("4b", 3_880_263_168, 34, 2560, 10_240, 8, 4, 256, 1024, 256, 262_208),
        ("12b", 11_766_034_176, 48, 3840, 15_360, 16, 8, 256, 1024, 256, 262_208),
        ("27b", 27_009_346_304, 62, 5376, 21_504, 32, 16, 128, 1024, 168, 262_208),
    )
}
_OLMO2 = {
    f"olmo-2-{size}": _shape(
        "olmo2", num_params, layers, width, ffn, heads,
        num_key_value_heads=kv_heads, vocab_size=100_352,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    for size, num_params, layers, width, ffn, heads, kv_heads in (
        ("1b", 1_484_916_736, 16, 2048, 8192, 16, 16),
        ("7b", 7_298_617_344, 32, 4096, 11_008, 32, 32),
        ("13b", 13_716_198_400, 40, 5120, 13_824, 40, 40),
        ("32b", 32_234_279_936, 64, 5120, 27_648, 40, 8),
    )
}
_PHI4 = {
    "phi-4": _shape(
        "phi3", 14_659_507_200, 40, 5120, 17_920, 40,
        num_key_value_heads=10, vocab_size=100_352, max_position_embeddings=16_384,
        rope_parameters={"rope_type": "default", "rope_theta": 2.5e5},
    ),
    "phi-4-mini": _shape(
        "phi3", 3_836_021_760, 32, 3072, 8192, 24,
        num_key_value_heads=8, vocab_size=200_064, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
}
_SMOLLM3 = {
    "smollm3-3b": _shape(
        "smollm3", 3_075_098_624, 36, 2048, 11_008, 16,
        num_key_value_heads=4, vocab_size=128_256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )
}
_MODERNBERT = {
    "modernbert-base": _shape("modernbert", 149_655_232, 22, 768, 1152, 12, seq=1024, vocab_size=50_368),
    "modernbert-large": _shape("modernbert", 395_881_664, 28, 1024, 2624, 16, seq=1024, vocab_size=50_368),
}
# fmt: on

TRANSFORMERS_SHAPES: Mapping[str, TransformersShape] = MappingProxyType(
    {**_QWEN3, **_QWEN3_MOE, **_MISTRAL, **_GEMMA3, **_OLMO2, **_PHI4, **_SMOLLM3, **_MODERNBERT}
)


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
