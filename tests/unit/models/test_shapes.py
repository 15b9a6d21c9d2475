from dataclasses import replace

import pytest
from whole import whole

from shardwise.base.errors import UnknownName
from shardwise.models.catalogue import CATALOGUE, TRANSFORMERS_SHAPES, shape_of
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape

# As published: GPT-2 and OPT checkpoints, Llama checkpoints, timm's ViT, torchvision's ResNet; MPT by
# llm-foundry's training tables.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "mpt-125m": 125_311_488,
    "mpt-7b": 6_658_859_008,
    "mpt-30b": 29_975_214_080,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "vit-huge": 632_045_800,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
}


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED.items())
def test_the_formula_gives_the_published_count(name: str, num_params: int) -> None:
    assert shape_of(name).num_params == num_params


SMALL = [name for name in CATALOGUE if shape_of(name).num_params < 2e9 and name not in TRANSFORMERS_SHAPES]
LARGE = [name for name in CATALOGUE if name not in (*SMALL, *TRANSFORMERS_SHAPES)]


@pytest.mark.parametrize("name", [*SMALL, *whole(*LARGE)])
def test_the_module_has_as_many_parameters_as_the_formula_says(name: str) -> None:
    shape = shape_of(name)
    model = build_model(shape, device="meta")
    if isinstance(shape, GPTShape | LlamaShape):
        num_tables = 2 if isinstance(shape, LlamaShape) and not shape.tied else 1
        padding = num_tables * (shape.vocab_rows - shape.vocab_size) * shape.width
        assert sum(p.numel() for p in model.parameters()) == shape.num_params + padding
        # Without the padding of its vocabulary it is what was published.
        model = build_model(replace(shape, vocab_multiple=1), device="meta")
    assert sum(p.numel() for p in model.parameters()) == shape.num_params


# Parameters of published checkpoints, and where the number is stated. safetensors: the total that the hub shows for the
# repository; GGUF: general.parameter_count, or n_params of llama.cpp, of a conversion; Keras: params of its presets.
# Of Gemma 3 4b, 12b and 27b it is the language model, without the vision tower that safetensors' total includes.
OF_CHECKPOINTS = {
    "qwen3-0.6b": (596_049_920, "Qwen/Qwen3-0.6B: sum of the loaded parameters, and GGUF"),
    "qwen3-1.7b": (1_720_574_976, "Qwen/Qwen3-1.7B: GGUF and Keras; its files hold the tied head a second time"),
    "qwen3-4b": (4_022_468_096, "Qwen/Qwen3-4B: safetensors and GGUF"),
    "qwen3-8b": (8_190_735_360, "Qwen/Qwen3-8B: safetensors and GGUF"),
    "qwen3-14b": (14_768_307_200, "Qwen/Qwen3-14B: safetensors and Keras"),
    "qwen3-32b": (32_762_123_264, "Qwen/Qwen3-32B: safetensors and Keras"),
    "qwen3-30b-a3b": (30_532_122_624, "Qwen/Qwen3-30B-A3B: GGUF"),
    "mistral-nemo-12b": (12_247_782_400, "mistralai/Mistral-Nemo-Instruct-2407: GGUF"),
    "mistral-small-24b": (23_572_403_200, "GGUF of Mistral Small 3; Keras for Magistral and Devstral Small"),
    "gemma-3-270m": (268_098_176, "google/gemma-3-270m-it: GGUF and Keras"),
    "gemma-3-1b": (999_885_952, "google/gemma-3-1b-it: safetensors, GGUF and Keras"),
    "gemma-3-4b": (3_880_263_168, "google/gemma-3-4b-it: GGUF, and Gemma3ForCausalLM's parameters"),
    "gemma-3-12b": (11_766_034_176, "gemma-3-12b-it: GGUF"),
    "gemma-3-27b": (27_009_346_304, "gemma-3-27b-it: GGUF"),
    "olmo-2-1b": (1_484_916_736, "allenai/OLMo-2-0425-1B: safetensors, and OLMo-core's olmo2_1B_v2"),
    "olmo-2-7b": (7_298_617_344, "allenai/OLMo-2-1124-7B: safetensors"),
    "olmo-2-13b": (13_716_198_400, "allenai/OLMo-2-1124-13B: counts listed with the revision of the hub"),
    "olmo-2-32b": (32_234_279_936, "OLMo 2 32B: a public table of training compute; no second source"),
    "phi-4": (14_659_507_200, "microsoft/phi-4: GGUF, and NVIDIA NeMo's num_parameters"),
    "phi-4-mini": (3_836_021_760, "microsoft/Phi-4-mini-instruct: parameters of the checkpoint"),
    "smollm3-3b": (3_075_098_624, "HuggingFaceTB/SmolLM3-3B: total_parameters of its safetensors index"),
    "modernbert-base": (149_655_232, "answerdotai/ModernBERT-base: ModernBertForMaskedLM's parameters"),
    "modernbert-large": (395_881_664, "answerdotai/ModernBERT-large: parameters of the checkpoint"),
}


def test_every_model_of_transformers_has_the_count_of_its_published_checkpoint() -> None:
    counts = {name: shape.num_params for name, shape in TRANSFORMERS_SHAPES.items()}
    assert counts == {name: count for name, (count, _) in OF_CHECKPOINTS.items()}


@pytest.mark.parametrize("name", TRANSFORMERS_SHAPES)
def test_the_module_of_transformers_has_as_many_parameters_as_the_catalogue_says(name: str) -> None:
    pytest.importorskip("transformers")
    model = build_model(shape_of(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == shape_of(name).num_params


def test_the_1_3b_gpt_is_opt_but_for_its_vocabulary_and_positions() -> None:
    shape = shape_of("gpt-1.3b")
    assert isinstance(shape, GPTShape)
    assert replace(shape, vocab_size=50272, max_seq=2050).num_params == 1_315_758_080


def test_tinyllama_is_a_llama_shape() -> None:
    shape = LlamaShape(
        num_layers=22,
        width=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_width=5632,
        vocab_size=32000,
        max_seq=2048,
    )
    assert shape.num_params == 1_100_048_384


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean llama-3.1-8b"):
        shape_of("llama3.1-8b")
