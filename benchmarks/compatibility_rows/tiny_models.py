"""Tiny models with random weights: one of each architecture, from transformers' and timm's own classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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

    library: str
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


def _text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _long_text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 32)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _images(generator: torch.Generator, *, size: int = IMAGE) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, size, size, generator=generator), "labels": _labels(generator)}


def _sound(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, 800, generator=generator), "labels": _labels(generator)}


def _speech(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 32, generator=generator), "labels": _tokens(generator)}


def _spectrogram(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(BATCH, 32, 16, generator=generator), "labels": _labels(generator)}


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

    return Architecture(library="transformers", class_name=class_name, make=make, batch=batch, loss=_hugging_face_loss)


def _without_chance(config: Any) -> None:
    """No dropout: ranks draw other numbers than one process does."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _without_chance(value)


def _timm(name: str, *, size: int = 64, **values: Any) -> Architecture:
    def make() -> nn.Module:
        timm = __import__("timm")
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **values)
        return model.train()

    def batch(generator: torch.Generator) -> Batch:
        images = torch.randn(BATCH, 3, size, size, generator=generator)
        return {"images": images, "labels": _labels(generator)}

    return Architecture(library="timm", class_name=name, make=make, batch=batch, loss=_image_loss)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONV_SOUND = {
    "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "classifier_proj_size": 16,
}  # fmt: skip
_STAGES = {"depths": [1, 2], "hidden_sizes": [16, 32], "num_stages": 2}

HUGGING_FACE: dict[str, Architecture] = {
    # Decoders.
    "gpt2": _hugging_face("GPT2LMHeadModel", _text),
    "openai-gpt": _hugging_face("OpenAIGPTLMHeadModel", _text),
    "gpt-neo": _hugging_face("GPTNeoForCausalLM", _text, attention_types=[[["global", "local"], 1]]),
    "gpt-j": _hugging_face("GPTJForCausalLM", _text, rotary_dim=8),
    "gpt-neox": _hugging_face("GPTNeoXForCausalLM", _text),
    "codegen": _hugging_face("CodeGenForCausalLM", _text, rotary_dim=4, num_attention_heads=4),
    "opt": _hugging_face("OPTForCausalLM", _text, ffn_dim=64, word_embed_proj_dim=32),
    "bloom": _hugging_face("BloomForCausalLM", _text),
    "falcon": _hugging_face("FalconForCausalLM", _text),
    "mpt": _hugging_face("MptForCausalLM", _text, expansion_ratio=2),
    "llama": _hugging_face("LlamaForCausalLM", _text),
    "llama-tied": _hugging_face("LlamaForCausalLM", _text, tie_word_embeddings=True),
    "mistral": _hugging_face("MistralForCausalLM", _text),
    "mixtral": _hugging_face("MixtralForCausalLM", _text, num_local_experts=4),
    "qwen2": _hugging_face("Qwen2ForCausalLM", _text),
    "qwen2-moe": _hugging_face("Qwen2MoeForCausalLM", _text, shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3": _hugging_face("Qwen3ForCausalLM", _text),
    "qwen3-moe": _hugging_face("Qwen3MoeForCausalLM", _text, **_EXPERTS),
    "gemma": _hugging_face("GemmaForCausalLM", _text),
    "gemma2": _hugging_face("Gemma2ForCausalLM", _text),
    "gemma3": _hugging_face("Gemma3ForCausalLM", _text),
    "phi": _hugging_face("PhiForCausalLM", _text),
    "phi3": _hugging_face("Phi3ForCausalLM", _text),
    "stablelm": _hugging_face("StableLmForCausalLM", _text, num_key_value_heads=2),
    "starcoder2": _hugging_face("Starcoder2ForCausalLM", _text),
    "olmo": _hugging_face("OlmoForCausalLM", _text),
    "olmo2": _hugging_face("Olmo2ForCausalLM", _text),
    "olmoe": _hugging_face("OlmoeForCausalLM", _text, num_experts=4, num_experts_per_tok=2),
    "cohere": _hugging_face("CohereForCausalLM", _text),
    "granite": _hugging_face("GraniteForCausalLM", _text),
    "granite-moe": _hugging_face("GraniteMoeForCausalLM", _text, num_local_experts=4, num_experts_per_tok=2),
    "nemotron": _hugging_face("NemotronForCausalLM", _text),
    "glm": _hugging_face("GlmForCausalLM", _text),
    "helium": _hugging_face("HeliumForCausalLM", _text),
    "smollm3": _hugging_face("SmolLM3ForCausalLM", _text),
    "persimmon": _hugging_face("PersimmonForCausalLM", _text),
    "xglm": _hugging_face("XGLMForCausalLM", _text, ffn_dim=64, attention_heads=2),
    "biogpt": _hugging_face("BioGptForCausalLM", _text),
    "ctrl": _hugging_face("CTRLLMHeadModel", _text, dff=64),
    "mamba": _hugging_face("MambaForCausalLM", _text, state_size=4, use_mambapy=False),
    "rwkv": _hugging_face("RwkvForCausalLM", _text, attention_hidden_size=32),
    "xlnet": _hugging_face("XLNetLMHeadModel", _text, d_inner=64, n_head=2, d_head=16),
    # Encoders.
    "bert": _hugging_face("BertForMaskedLM", _text),
    "roberta": _hugging_face("RobertaForMaskedLM", _text),
    "xlm-roberta": _hugging_face("XLMRobertaForMaskedLM", _text),
    "camembert": _hugging_face("CamembertForMaskedLM", _text),
    "albert": _hugging_face("AlbertForMaskedLM", _text),
    "distilbert": _hugging_face("DistilBertForMaskedLM", _text, dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "electra": _hugging_face("ElectraForMaskedLM", _text),
    "deberta": _hugging_face("DebertaForMaskedLM", _text),
    "deberta-v2": _hugging_face("DebertaV2ForMaskedLM", _text),
    "mpnet": _hugging_face("MPNetForMaskedLM", _text),
    "convbert": _hugging_face("ConvBertForMaskedLM", _text, num_attention_heads=4),
    "squeezebert": _hugging_face(
        "SqueezeBertForMaskedLM", _text, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2
    ),
    "mobilebert": _hugging_face("MobileBertForMaskedLM", _text, true_hidden_size=16, intra_bottleneck_size=16),
    "megatron-bert": _hugging_face("MegatronBertForMaskedLM", _text),
    "modernbert": _hugging_face("ModernBertForMaskedLM", _text),
    "roformer": _hugging_face("RoFormerForMaskedLM", _text),
    "rembert": _hugging_face("RemBertForMaskedLM", _text, input_embedding_size=16, output_embedding_size=24),
    "ernie": _hugging_face("ErnieForMaskedLM", _text),
    "nystromformer": _hugging_face("NystromformerForMaskedLM", _text, num_landmarks=4, segment_means_seq_len=12),
    "fnet": _hugging_face("FNetForMaskedLM", _text),
    "funnel": _hugging_face("FunnelForMaskedLM", _text, block_sizes=[1, 1], n_head=2, d_head=16, d_inner=64),
    "longformer": _hugging_face("LongformerForMaskedLM", _long_text, attention_window=8),
    "big-bird": _hugging_face("BigBirdForMaskedLM", _long_text, attention_type="original_full"),
    # Encoders with decoders.
    "t5": _hugging_face("T5ForConditionalGeneration", _pairs, dropout_rate=0.0, decoder_start_token_id=0),
    "mt5": _hugging_face("MT5ForConditionalGeneration", _pairs, dropout_rate=0.0),
    "umt5": _hugging_face("UMT5ForConditionalGeneration", _pairs, dropout_rate=0.0),
    "bart": _hugging_face("BartForConditionalGeneration", _pairs),
    "mbart": _hugging_face("MBartForConditionalGeneration", _pairs),
    "pegasus": _hugging_face("PegasusForConditionalGeneration", _pairs),
    "marian": _hugging_face("MarianMTModel", _pairs, decoder_vocab_size=VOCABULARY),
    "blenderbot": _hugging_face("BlenderbotForConditionalGeneration", _pairs),
    "m2m-100": _hugging_face("M2M100ForConditionalGeneration", _pairs),
    "led": _hugging_face(
        "LEDForConditionalGeneration",
        _pairs,
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    # Images.
    "vit": _hugging_face("ViTForImageClassification", _images),
    "deit": _hugging_face("DeiTForImageClassification", _images),
    "beit": _hugging_face("BeitForImageClassification", _images),
    "dinov2": _hugging_face("Dinov2ForImageClassification", _images),
    "swin": _hugging_face(
        "SwinForImageClassification",
        _images,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        num_attention_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _hugging_face("ConvNextForImageClassification", _images, patch_size=4, **_STAGES),
    "convnextv2": _hugging_face("ConvNextV2ForImageClassification", _images, patch_size=4, **_STAGES),
    "resnet": _hugging_face(
        "ResNetForImageClassification", _images, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]
    ),
    "regnet": _hugging_face(
        "RegNetForImageClassification", _images, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=8
    ),
    "mobilenet-v2": _hugging_face("MobileNetV2ForImageClassification", _images, depth_multiplier=0.35),
    "poolformer": _hugging_face(
        "PoolFormerForImageClassification", _images, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32]
    ),
    "segformer": _hugging_face(
        "SegformerForImageClassification",
        _images,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
        patch_sizes=[7, 3, 3, 3],
    ),
    # Sound, images with text, time series.
    "whisper": _hugging_face(
        "WhisperForConditionalGeneration",
        _speech,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    "wav2vec2": _hugging_face("Wav2Vec2ForSequenceClassification", _sound, **_CONV_SOUND),
    "hubert": _hugging_face("HubertForSequenceClassification", _sound, **_CONV_SOUND),
    "wavlm": _hugging_face("WavLMForSequenceClassification", _sound, **_CONV_SOUND),
    "audio-spectrogram": _hugging_face(
        "ASTForAudioClassification", _spectrogram, max_length=32, num_mel_bins=16, patch_size=8
    ),
    "clip": _hugging_face(
        "CLIPModel",
        _captions,
        projection_dim=16,
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": IMAGE,
            "patch_size": 8,
        },
    ),
    "patchtst": _hugging_face(
        "PatchTSTForPrediction",
        _series,
        num_input_channels=2,
        context_length=16,
        prediction_length=4,
        patch_length=4,
        patch_stride=4,
        ffn_dim=64,
        pre_norm=True,
        norm_type="layernorm",
    ),
}

_VIT = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}

TIMM: dict[str, Architecture] = {
    "vit": _timm("vit_tiny_patch16_224", size=IMAGE, **_VIT),
    "deit": _timm("deit_tiny_distilled_patch16_224", size=IMAGE, **_VIT),
    "deit3": _timm("deit3_small_patch16_224", size=IMAGE, **_VIT),
    "beit": _timm("beit_base_patch16_224", size=IMAGE, **_VIT),
    "eva02": _timm("eva02_tiny_patch14_224", size=IMAGE, **_VIT),
    "cait": _timm("cait_xxs24_224", size=IMAGE, **_VIT),
    "xcit": _timm("xcit_nano_12_p16_224", size=IMAGE, img_size=IMAGE, embed_dim=32, depth=2, num_heads=2),
    "gmlp": _timm("gmlp_ti16_224", img_size=64),
    "swin": _timm(
        "swin_tiny_patch4_window7_224",
        drop_path_rate=0.0,
        size=56,
        img_size=56,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(1, 2),
    ),
    "convnext": _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    "convnextv2": _timm("convnextv2_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    "resnet": _timm("resnet10t"),
    "resnext": _timm("resnext26ts"),
    "regnetx": _timm("regnetx_002"),
    "regnety": _timm("regnety_002"),
    "efficientnet": _timm("efficientnet_lite0"),
    "mobilenetv2": _timm("mobilenetv2_035"),
    "mobilenetv3": _timm("mobilenetv3_small_050"),
    "mobilenetv4": _timm("mobilenetv4_conv_small_050"),
    "mnasnet": _timm("mnasnet_small"),
    "ghostnet": _timm("ghostnet_050", drop_rate=0.0),
    "lcnet": _timm("lcnet_050"),
    "tinynet": _timm("tinynet_e"),
    "dla": _timm("dla46x_c"),
    "edgenext": _timm("edgenext_xx_small"),
    "mobilevit": _timm("mobilevit_xxs"),
    "repvgg": _timm("repvgg_a0"),
    "starnet": _timm("starnet_s1"),
    "inception-next": _timm("inception_next_atto"),
}

ARCHITECTURES: dict[str, Architecture] = {
    **{f"hf:{name}": one for name, one in HUGGING_FACE.items()},
    **{f"timm:{name}": one for name, one in TIMM.items()},
}
