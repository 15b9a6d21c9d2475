"""Tiny models with random weights: one of each architecture, from transformers' and timm's own classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scenario_rows.optimizers import Training
from scenario_rows.runners import Runner, Weights
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
BATCH, LENGTH, VOCABULARY, CLASSES, IMAGE = 2, 12, 64, 2, 32

# Given to every configuration that knows the name.
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 1, "head_dim": 16,
    "embedding_size": 32, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_heads": 2, "image_size": IMAGE, "patch_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`make` builds the model as it is initialised; `batch` gives one rank's inputs of a step."""

    class_name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def _hugging_face_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    assert isinstance(loss, Tensor)
    return loss.mean()


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


# What models are given, by kind.


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY - 4, (BATCH, length), generator=generator)


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=generator)


def _text(generator: torch.Generator, *, length: int = LENGTH) -> Batch:
    tokens = _tokens(generator, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


_long_text = partial(_text, length=32)


def _pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _classified(generator: torch.Generator, *, name: str, shape: tuple[int, ...]) -> Batch:
    return {name: torch.randn(BATCH, *shape, generator=generator), "labels": _labels(generator)}


_images = partial(_classified, name="pixel_values", shape=(3, IMAGE, IMAGE))
_sound = partial(_classified, name="input_values", shape=(800,))
_spectrogram = partial(_classified, name="input_values", shape=(32, 16))


def _speech(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 32, generator=generator), "labels": _tokens(generator)}


def _captions(generator: torch.Generator) -> Batch:
    images = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": images, "return_loss": torch.tensor(True)}


def _series(generator: torch.Generator) -> Batch:
    values = torch.randn(BATCH, 20, 2, generator=generator)
    return {"past_values": values[:, :16], "future_values": values[:, 16:]}


def _hugging_face(class_name: str, batch: Callable[[torch.Generator], Batch], **values: Any) -> Architecture:
    def make() -> nn.Module:
        transformers = __import__("transformers")
        kind = getattr(transformers, class_name)
        default = kind.config_class()
        known = {name: value for name, value in _TINY.items() if name in vars(default) or name in default.attribute_map}
        config = kind.config_class(**{**known, "num_labels": CLASSES, **values})
        _without_chance(config)
        torch.manual_seed(0)
        model: nn.Module = kind(config)
        return model.train()

    return Architecture(class_name=class_name, make=make, batch=batch, loss=_hugging_face_loss)


def _without_chance(config: Any) -> None:
    """No dropout: ranks draw other numbers than one process does."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _without_chance(value)


def _each(pairs: str, batch: Callable[[torch.Generator], Batch], *, suffix: str) -> dict[str, Architecture]:
    """Architectures that need no values of their own, from "name=Class name=Class"."""
    named = [pair.split("=") for pair in pairs.split()]
    return {name: _hugging_face(start + suffix, batch) for name, start in named}


def _timm(name: str, *, size: int = 64, **values: Any) -> Architecture:
    def make() -> nn.Module:
        timm = __import__("timm")
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **values)
        return model.train()

    batch = partial(_classified, name="images", shape=(3, size, size))
    return Architecture(class_name=name, make=make, batch=batch, loss=_image_loss)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONV_SOUND = {
    "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "classifier_proj_size": 16,
}  # fmt: skip
_STAGES = {"depths": [1, 2], "hidden_sizes": [16, 32], "num_stages": 2}
_FOUR_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
_SWIN = {"depths": [2, 2], "num_heads": [2, 4], "num_attention_heads": [2, 4]}
_SEGFORMER = {"num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16, "patch_sizes": [7, 3, 3, 3]}
_POSITIONS = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
_WHISPER = {
    "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip
_CLIP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_CLIP_TEXT = {**_CLIP, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2, "pad_token_id": 0}
_CLIP_IMAGE = {**_CLIP, "image_size": IMAGE, "patch_size": 8}
_PATCHTST = {
    "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
    "ffn_dim": 64, "pre_norm": True, "norm_type": "layernorm",
}  # fmt: skip

HUGGING_FACE: dict[str, Architecture] = {
    # Decoders.
    "gpt2": _hugging_face("GPT2LMHeadModel", _text),
    "openai-gpt": _hugging_face("OpenAIGPTLMHeadModel", _text),
    "gpt-neo": _hugging_face("GPTNeoForCausalLM", _text, attention_types=[[["global", "local"], 1]]),
    "gpt-j": _hugging_face("GPTJForCausalLM", _text, rotary_dim=8),
    "codegen": _hugging_face("CodeGenForCausalLM", _text, rotary_dim=4, num_attention_heads=4),
    "opt": _hugging_face("OPTForCausalLM", _text, ffn_dim=64, word_embed_proj_dim=32),
    "mpt": _hugging_face("MptForCausalLM", _text, expansion_ratio=2),
    **_each(
        "gpt-neox=GPTNeoX bloom=Bloom falcon=Falcon llama=Llama mistral=Mistral qwen2=Qwen2 qwen3=Qwen3 gemma=Gemma "
        "gemma2=Gemma2 gemma3=Gemma3 phi=Phi phi3=Phi3 starcoder2=Starcoder2 olmo=Olmo olmo2=Olmo2 cohere=Cohere "
        "granite=Granite nemotron=Nemotron glm=Glm helium=Helium smollm3=SmolLM3 persimmon=Persimmon biogpt=BioGpt",
        _text,
        suffix="ForCausalLM",
    ),
    "llama-tied": _hugging_face("LlamaForCausalLM", _text, tie_word_embeddings=True),
    "mixtral": _hugging_face("MixtralForCausalLM", _text, num_local_experts=4),
    "qwen2-moe": _hugging_face("Qwen2MoeForCausalLM", _text, shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3-moe": _hugging_face("Qwen3MoeForCausalLM", _text, **_EXPERTS),
    "stablelm": _hugging_face("StableLmForCausalLM", _text, num_key_value_heads=2),
    "olmoe": _hugging_face("OlmoeForCausalLM", _text, num_experts=4, num_experts_per_tok=2),
    "granite-moe": _hugging_face("GraniteMoeForCausalLM", _text, num_local_experts=4, num_experts_per_tok=2),
    "xglm": _hugging_face("XGLMForCausalLM", _text, ffn_dim=64, attention_heads=2),
    "ctrl": _hugging_face("CTRLLMHeadModel", _text, dff=64),
    "mamba": _hugging_face("MambaForCausalLM", _text, state_size=4, use_mambapy=False),
    "rwkv": _hugging_face("RwkvForCausalLM", _text, attention_hidden_size=32),
    "xlnet": _hugging_face("XLNetLMHeadModel", _text, d_inner=64, n_head=2, d_head=16),
    # Encoders.
    **_each(
        "bert=Bert roberta=Roberta xlm-roberta=XLMRoberta camembert=Camembert albert=Albert electra=Electra "
        "deberta=Deberta deberta-v2=DebertaV2 mpnet=MPNet megatron-bert=MegatronBert modernbert=ModernBert "
        "roformer=RoFormer ernie=Ernie fnet=FNet",
        _text,
        suffix="ForMaskedLM",
    ),
    "distilbert": _hugging_face("DistilBertForMaskedLM", _text, dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "convbert": _hugging_face("ConvBertForMaskedLM", _text, num_attention_heads=4),
    "squeezebert": _hugging_face(
        "SqueezeBertForMaskedLM", _text, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2
    ),
    "mobilebert": _hugging_face("MobileBertForMaskedLM", _text, true_hidden_size=16, intra_bottleneck_size=16),
    "rembert": _hugging_face("RemBertForMaskedLM", _text, input_embedding_size=16, output_embedding_size=24),
    "nystromformer": _hugging_face("NystromformerForMaskedLM", _text, num_landmarks=4, segment_means_seq_len=12),
    "funnel": _hugging_face("FunnelForMaskedLM", _text, block_sizes=[1, 1], n_head=2, d_head=16, d_inner=64),
    "longformer": _hugging_face("LongformerForMaskedLM", _long_text, attention_window=8),
    "big-bird": _hugging_face("BigBirdForMaskedLM", _long_text, attention_type="original_full"),
    # Encoders with decoders.
    "t5": _hugging_face("T5ForConditionalGeneration", _pairs, dropout_rate=0.0, decoder_start_token_id=0),
    "mt5": _hugging_face("MT5ForConditionalGeneration", _pairs, dropout_rate=0.0),
    "umt5": _hugging_face("UMT5ForConditionalGeneration", _pairs, dropout_rate=0.0),
    **_each(
        "bart=Bart mbart=MBart pegasus=Pegasus blenderbot=Blenderbot m2m-100=M2M100",
        _pairs,
        suffix="ForConditionalGeneration",
    ),
    "marian": _hugging_face("MarianMTModel", _pairs, decoder_vocab_size=VOCABULARY),
    "led": _hugging_face("LEDForConditionalGeneration", _pairs, attention_window=4, **_POSITIONS),
    # Images.
    **_each("vit=ViT deit=DeiT beit=Beit dinov2=Dinov2", _images, suffix="ForImageClassification"),
    "swin": _hugging_face("SwinForImageClassification", _images, patch_size=2, embed_dim=16, window_size=4, **_SWIN),
    "convnext": _hugging_face("ConvNextForImageClassification", _images, patch_size=4, **_STAGES),
    "convnextv2": _hugging_face("ConvNextV2ForImageClassification", _images, patch_size=4, **_STAGES),
    "resnet": _hugging_face("ResNetForImageClassification", _images, **_RESNET),
    "regnet": _hugging_face("RegNetForImageClassification", _images, groups_width=8, **_RESNET),
    "mobilenet-v2": _hugging_face("MobileNetV2ForImageClassification", _images, depth_multiplier=0.35),
    "poolformer": _hugging_face("PoolFormerForImageClassification", _images, **_FOUR_STAGES),
    "segformer": _hugging_face("SegformerForImageClassification", _images, **_FOUR_STAGES, **_SEGFORMER),
    # Sound, images with text, time series.
    "whisper": _hugging_face("WhisperForConditionalGeneration", _speech, **_WHISPER),
    "wav2vec2": _hugging_face("Wav2Vec2ForSequenceClassification", _sound, **_CONV_SOUND),
    "hubert": _hugging_face("HubertForSequenceClassification", _sound, **_CONV_SOUND),
    "wavlm": _hugging_face("WavLMForSequenceClassification", _sound, **_CONV_SOUND),
    "audio-spectrogram": _hugging_face(
        "ASTForAudioClassification", _spectrogram, max_length=32, num_mel_bins=16, patch_size=8
    ),
    "clip": _hugging_face("CLIPModel", _captions, projection_dim=16, text_config=_CLIP_TEXT, vision_config=_CLIP_IMAGE),
    "patchtst": _hugging_face("PatchTSTForPrediction", _series, **_PATCHTST),
}

_VIT = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}
_TIMM_VIT = {
    "vit": "vit_tiny_patch16_224", "deit": "deit_tiny_distilled_patch16_224", "deit3": "deit3_small_patch16_224",
    "beit": "beit_base_patch16_224", "eva02": "eva02_tiny_patch14_224", "cait": "cait_xxs24_224",
}  # fmt: skip
_TIMM_AS_IT_IS = {
    "resnet": "resnet10t", "resnext": "resnext26ts", "regnetx": "regnetx_002", "regnety": "regnety_002",
    "efficientnet": "efficientnet_lite0", "mobilenetv2": "mobilenetv2_035", "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv4": "mobilenetv4_conv_small_050", "mnasnet": "mnasnet_small", "lcnet": "lcnet_050",
    "tinynet": "tinynet_e", "dla": "dla46x_c", "edgenext": "edgenext_xx_small", "mobilevit": "mobilevit_xxs",
    "repvgg": "repvgg_a0", "starnet": "starnet_s1", "inception-next": "inception_next_atto",
}  # fmt: skip
_TIMM_SWIN = {"img_size": 56, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "drop_path_rate": 0.0}

TIMM: dict[str, Architecture] = {
    **{name: _timm(reference, size=IMAGE, **_VIT) for name, reference in _TIMM_VIT.items()},
    "xcit": _timm("xcit_nano_12_p16_224", size=IMAGE, img_size=IMAGE, embed_dim=32, depth=2, num_heads=2),
    "gmlp": _timm("gmlp_ti16_224", img_size=64),
    "swin": _timm("swin_tiny_patch4_window7_224", size=56, **_TIMM_SWIN),
    "convnext": _timm("convnext_atto", **_CONVNEXT),
    "convnextv2": _timm("convnextv2_atto", **_CONVNEXT),
    "ghostnet": _timm("ghostnet_050", drop_rate=0.0),
    **{name: _timm(reference) for name, reference in _TIMM_AS_IT_IS.items()},
}

ARCHITECTURES: dict[str, Architecture] = {
    **{f"hf:{name}": one for name, one in HUGGING_FACE.items()},
    **{f"timm:{name}": one for name, one in TIMM.items()},
}


def train(runner: Runner, architecture: Architecture) -> Weights:
    """Take three steps; return the parameters. Not with Adam, which makes much of a gradient that is only rounding."""
    model = architecture.make()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(called: nn.Module, step: int, share: int) -> Tensor:
        return architecture.loss(called, architecture.batch(torch.Generator().manual_seed(100 * step + share)))

    weights = Training(runner, model, optimizer).train(3, loss)
    return {name: weights[name] for name in names}


ROWS: dict[str, Callable[[Runner], Weights]] = {
    name: partial(train, architecture=architecture) for name, architecture in ARCHITECTURES.items()
}
