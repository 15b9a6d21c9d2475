"""The parameter names of Hugging Face's Llama and GPT-2 for our models, and the weights that they store transposed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.base.errors import InvalidModel


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceLayout:
    """The names of one architecture.

    modules      our module → their module; * stands for the number of a block
    transposed   our modules whose weight they store as inputs × outputs (GPT-2's Conv1D)
    prefix       the prefix that files of the model without a head leave out
    derived      suffixes of tensors that are computed from the shape (masks, angles) and hold no weights
    """

    modules: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    prefix: str
    derived: tuple[str, ...]

    def theirs(self, name: str) -> str | None:
        """Return their name for one of our tensors; None if this architecture does not have it."""
        return _renamed(name, modules=self.modules)

    def ours(self, name: str) -> str | None:
        """Return our name for one of their tensors; None if this architecture does not have it."""
        modules = {theirs: ours for ours, theirs in self.modules.items()}
        return _renamed(name, modules=modules) or _renamed(self.prefix + name, modules=modules)

    def is_derived(self, name: str) -> bool:
        return name.endswith(self.derived)

    def is_transposed(self, name: str) -> bool:
        """Return whether their files store the tensor of this name (ours) transposed."""
        module, _, kind = _starred(name)[0].rpartition(".")
        return kind == "weight" and module in self.transposed


GPT2 = HuggingFaceLayout(
    modules={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks.*.norm1": "transformer.h.*.ln_1",
        "blocks.*.attention.qkv": "transformer.h.*.attn.c_attn",
        "blocks.*.attention.out": "transformer.h.*.attn.c_proj",
        "blocks.*.norm2": "transformer.h.*.ln_2",
        "blocks.*.feed_forward.up": "transformer.h.*.mlp.c_fc",
        "blocks.*.feed_forward.down": "transformer.h.*.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=frozenset(
        f"blocks.*.{module}" for module in ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down")
    ),
    prefix="transformer.",
    derived=(".attn.bias", ".attn.masked_bias"),
)
LLAMA = HuggingFaceLayout(
    modules={
        "embed": "model.embed_tokens",
        "blocks.*.norm1": "model.layers.*.input_layernorm",
        "blocks.*.attention.q": "model.layers.*.self_attn.q_proj",
        "blocks.*.attention.k": "model.layers.*.self_attn.k_proj",
        "blocks.*.attention.v": "model.layers.*.self_attn.v_proj",
        "blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
        "blocks.*.norm2": "model.layers.*.post_attention_layernorm",
        "blocks.*.feed_forward.gate": "model.layers.*.mlp.gate_proj",
        "blocks.*.feed_forward.up": "model.layers.*.mlp.up_proj",
        "blocks.*.feed_forward.down": "model.layers.*.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    prefix="model.",
    derived=(".rotary_emb.inv_freq",),
)
LAYOUTS = (GPT2, LLAMA)


def layout_of_ours(names: Iterable[str]) -> HuggingFaceLayout:
    """Return the architecture that has all these names of ours."""
    known = set(names)
    return _only([layout for layout in LAYOUTS if all(layout.theirs(name) for name in known)], names=known)


def layout_of_theirs(names: Iterable[str]) -> HuggingFaceLayout:
    """Return the architecture that has all these names of theirs."""
    known = set(names)
    fitting = [layout for layout in LAYOUTS if all(layout.is_derived(name) or layout.ours(name) for name in known)]
    return _only(fitting, names=known)


def _only(fitting: list[HuggingFaceLayout], *, names: set[str]) -> HuggingFaceLayout:
    if len(fitting) != 1:
        some = ", ".join(sorted(names)[:3])
        raise InvalidModel(f"these are not the tensors of a Llama or a GPT-2: {some}, … ({len(names)} in all)")
    return fitting[0]


def _starred(name: str) -> tuple[str, str]:
    """Split "blocks.3.norm1.weight" into ("blocks.*.norm1.weight", "3")."""
    parts = name.split(".")
    number = next((part for part in parts if part.isdigit()), "")
    return ".".join("*" if part.isdigit() else part for part in parts), number


def _renamed(name: str, *, modules: Mapping[str, str]) -> str | None:
    starred, number = _starred(name)
    module, _, kind = starred.rpartition(".")
    if module not in modules or kind not in ("weight", "bias"):
        return None
    return f"{modules[module]}.{kind}".replace("*", number)
