"""Our modules compute what the reference implementations compute, weight for weight."""

import pytest
import torch
from torch import Tensor, nn

from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape, RopeScaling, ViTShape
from shardwise.state.checkpoint.hugging_face import GPT2, LLAMA, HuggingFaceLayout

transformers = pytest.importorskip("transformers")


def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"head.weight"}


def in_our_names(theirs: nn.Module, *, layout: HuggingFaceLayout) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in theirs.state_dict().items():
        ours = layout.ours(name)
        assert ours is not None
        assert layout.theirs(ours) == name
        weights[ours] = tensor.t() if layout.is_transposed(ours) else tensor
    return weights


def jittered(model: nn.Module) -> nn.Module:
    """Biases and norms start at 0 and 1, where mistakes hide."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def test_gpt_computes_what_gpt2_computes() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=4)
    theirs = jittered(transformers.GPT2LMHeadModel(config))
    ours = build_model(
        GPTShape(num_layers=3, width=48, num_heads=4, vocab_size=97, vocab_multiple=1, max_seq=32)
    ).eval()
    weights = in_our_names(theirs, layout=GPT2)
    load(ours, weights)
    tokens = torch.randint(97, (2, 32))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_llama_computes_what_llama_computes(scaled: bool) -> None:
    torch.manual_seed(0)
    scaling = RopeScaling(factor=8.0, original_max_seq=16) if scaled else None
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    theirs = jittered(transformers.LlamaForCausalLM(config))
    shape = LlamaShape(
        num_layers=3,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=112,
        vocab_size=97,
        vocab_multiple=1,
        max_seq=64,
        rope_scaling=scaling,
    )
    ours = build_model(shape).eval()
    weights = in_our_names(theirs, layout=LLAMA)
    load(ours, weights)
    tokens = torch.randint(97, (2, 64))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=2e-5, rtol=1e-5)


def test_vit_computes_what_vit_computes() -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=32,
        patch_size=8,
        num_labels=11,
        layer_norm_eps=1e-6,
    )
    theirs = jittered(transformers.ViTForImageClassification(config))
    shape = ViTShape(num_layers=3, width=48, num_heads=4, image_size=32, patch_size=8, num_classes=11)
    ours = build_model(shape).eval()
    modules = dict(theirs.named_modules())
    blocks = next(m for name, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == 3)
    state = theirs.state_dict()

    def find(*endings: str) -> Tensor:
        (name,) = [
            n for n in state if any(n.endswith(e) for e in endings) and ".layer" not in n.replace("layernorm", "")
        ]
        return state[name]

    weights = {
        "embed.class_token": find("cls_token"),
        "embed.positions": find("position_embeddings"),
        "embed.project.weight": find("projection.weight"),
        "embed.project.bias": find("projection.bias"),
        "norm.weight": find("vit.layernorm.weight"),
        "norm.bias": find("vit.layernorm.bias"),
        "head.weight": find("classifier.weight"),
        "head.bias": find("classifier.bias"),
    }
    for index, block in enumerate(blocks):
        linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
        norms = [m for m in block.modules() if isinstance(m, nn.LayerNorm)]
        q, k, v, out, up, down = linears
        for kind in ("weight", "bias"):
            weights[f"blocks.{index}.attention.qkv.{kind}"] = torch.cat([getattr(m, kind) for m in (q, k, v)])
            for name, module in (
                ("attention.out", out),
                ("feed_forward.up", up),
                ("feed_forward.down", down),
                ("norm1", norms[0]),
                ("norm2", norms[1]),
            ):
                weights[f"blocks.{index}.{name}.{kind}"] = getattr(module, kind)
    load(ours, weights)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images).logits, atol=2e-5, rtol=1e-5)
