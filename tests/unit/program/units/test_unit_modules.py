import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shardwise.base.errors import InvalidModel
from shardwise.models.catalogue import CATALOGUE, TRANSFORMERS_SHAPES, shape_of
from shardwise.models.make import build_model
from shardwise.program.spec import ROOT
from shardwise.program.spec.model import why_hardly_cut
from shardwise.program.units import model_spec, unit_modules


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (self.blocks[2], self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.head(x)


def names(model: nn.Module, policy: str = "auto") -> list[str]:
    return list(unit_modules(model, policy=policy))


def test_blocks_of_every_family_are_found() -> None:
    assert names(build_model(shape_of("gpt-tiny"), device="meta")) == [
        ROOT,
        *(f"blocks.{i}" for i in range(4)),
    ]
    assert names(build_model(shape_of("resnet18"), device="meta")) == [
        ROOT,
        *(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)),
    ]
    assert len(names(build_model(shape_of("resnet50"), device="meta"))) == 1 + 16
    with torch.device("meta"):
        torch_transformer = nn.Transformer(8, 2, 2, 3, batch_first=True)
    assert names(torch_transformer) == [
        ROOT,
        *(f"encoder.layers.{i}" for i in range(2)),
        *(f"decoder.layers.{i}" for i in range(3)),
    ]


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in TRANSFORMERS_SHAPES])
def test_every_catalogue_model_is_cut_at_its_blocks_without_loss(name: str) -> None:
    model = build_model(shape_of(name), device="meta")
    spec = model_spec(model, name=name)
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert {path for unit in spec.units for p in unit.params for path in (p.name, *p.aliases)} == {
        path for path, _ in model.named_parameters(remove_duplicate=False)
    }
    classes = {type(module).__name__ for path, module in unit_modules(model, policy="blocks").items() if path != ROOT}
    assert classes <= {"Block", "LlamaBlock", "BasicBlock", "Bottleneck"}
    assert unit_modules(model).keys() - unit_modules(model, policy="blocks").keys() <= {"embed"}


def test_a_stack_of_leaves_is_not_a_stack_of_blocks() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == [ROOT]


class Plain(nn.Module):
    """Layers by name, as in many a first model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))


def layers(count: int, width: int = 512) -> list[nn.Module]:
    return [module for _ in range(count) for module in (nn.Linear(width, width), nn.ReLU())]


def test_large_layers_of_a_plain_sequential_are_units() -> None:
    with torch.device("meta"):
        assert names(nn.Sequential(*layers(3))) == [ROOT, "0", "2", "4"]
        assert names(nn.ModuleList(layers(2))) == [ROOT, "0", "2"]
        # Too small to be worth a collective of its own.
        assert names(nn.Sequential(*layers(3, width=500))) == [ROOT]
        # A stack in a stack is not one layer, and a module that holds most of the model is cut in turn.
        nested = nn.Sequential(nn.Sequential(*layers(2)), nn.Linear(512, 512))
        assert names(nested) == [ROOT, "0.0", "0.2", "1"]
        outer = nn.Sequential(Wrapped(*layers(3)), nn.Linear(512, 512))
        assert names(outer) == [ROOT, "0.layers.0", "0.layers.2", "0.layers.4", "1"]
        assert names(nn.Sequential(Wrapped(*layers(1)), *layers(1), Plain(512))) == [ROOT, "0", "1", "3"]


class Wrapped(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*parts)


def test_repeated_blocks_that_hold_most_of_the_model_stay_the_only_units() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(Block(1024) for _ in range(3))
        model.head = nn.Sequential(nn.Linear(1024, 1024))
        assert names(model) == [ROOT, *(f"blocks.{i}" for i in range(3))]
        # Tied weights belong to the root whatever is cut.
        model.blocks = nn.ModuleList(Block(4) for _ in range(3))
        model.head[0].weight = model.blocks[0].tied = nn.Parameter(torch.empty(1024, 1024))
        assert names(model) == [ROOT, *(f"blocks.{i}" for i in range(3))]


def test_large_embeddings_and_heads_are_units_unless_they_share_their_weights() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.embed, model.positions = nn.Embedding(2**17, 512), nn.Embedding(1024, 512)
        model.blocks = nn.ModuleList(Block(512) for _ in range(3))
        model.head = nn.Linear(512, 2**17, bias=False)
    blocks = [f"blocks.{i}" for i in range(3)]
    assert names(model) == [ROOT, "embed", *blocks, "head"]
    assert names(model, "blocks") == [ROOT, *blocks]
    assert {unit.name for unit in model_spec(model).units if unit.from_root} == {"embed", "head"}
    # Whoever names one means an ordinary unit.
    assert [unit.name for unit in model_spec(model, policy="auto + head").units if unit.from_root] == ["embed"]
    # Nothing of it is multiplied in fp8, as nothing of the root is.
    assert not any(param.linear for unit in model_spec(model).units for param in unit.params if unit.from_root)
    model.head.weight = model.embed.weight
    assert names(model) == [ROOT, *blocks]


def test_a_unit_that_holds_most_of_a_model_is_told_with_the_way_out() -> None:
    with torch.device("meta"):
        plain, wide = Plain(1024), nn.Sequential(*layers(4))
        embedding = nn.ModuleDict({"embed": nn.Embedding(4000, 512), "head": nn.Linear(512, 512)})
    told = why_hardly_cut(model_spec(plain), units="auto")
    assert told == (
        "units = 'auto' leaves 100% of Plain's parameters in one unit, (root), which is gathered at once: "
        "units = 'min-params:100000' cuts by size, 'auto + MODULE + …' by name"
    )
    for way_out in ("min-params:100000", "auto + first + second + third"):
        assert why_hardly_cut(model_spec(plain, policy=way_out), units=way_out) == ""
    assert why_hardly_cut(model_spec(plain, policy="none"), units="none") == ""
    assert why_hardly_cut(model_spec(wide), units="auto") == ""
    assert why_hardly_cut(model_spec(Plain(256)), units="auto") == ""
    # One tensor cannot be cut.
    assert why_hardly_cut(model_spec(embedding), units="auto") == ""


def test_only_the_outermost_blocks_are_units() -> None:
    experts = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(Block() for _ in range(2))}) for _ in range(2))
    outer = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2))
    assert names(experts) == [ROOT, *(f"{i}.experts.{j}" for i in range(2) for j in range(2))]
    for layer in outer:
        layer.extra = nn.ModuleList(Block() for _ in range(2))
    assert names(outer) == [ROOT, "0", "1"]


def test_each_policy_cuts_as_it_says() -> None:
    net = Net()
    assert names(net, "none") == [ROOT]
    assert names(net, "class:Linear") == [ROOT, *(f"blocks.{i}.inner" for i in range(3)), "head"]
    assert names(net, "leaf") == [
        ROOT,
        "embed",
        *(n for i in range(3) for n in (f"blocks.{i}", f"blocks.{i}.inner")),
        "head",
    ]
    assert names(net, "auto + head") == [ROOT, *(f"blocks.{i}" for i in range(3)), "head"]
    # A block holds 24 parameters, the embedding and the head 40 each.
    assert names(net, "min-params:25") == [ROOT, "embed", "head"]
    assert names(net, "min-params:24") == [ROOT, "embed", *(f"blocks.{i}" for i in range(3)), "head"]


@pytest.mark.parametrize("policy", ["auto", "leaf", "min-params:1"])
def test_modules_that_are_not_called_are_in_the_unit_that_reads_their_parameters(policy: str) -> None:
    """The linear layer of an attention, and the lists that hold the parameters of a parametrised module."""
    normed = parametrizations.weight_norm(nn.Linear(4, 4))
    stack = nn.ModuleList([nn.MultiheadAttention(4, 2), normed, parametrizations.spectral_norm(nn.Linear(4, 4))])
    # `auto` makes units of blocks and large layers only.
    expected = [ROOT] if policy == "auto" else [ROOT, "0", "1", "2"]
    assert names(stack, policy) == expected
    spec = model_spec(stack, policy=policy)
    assert sum(len(unit.params) for unit in spec.units) == len(list(stack.parameters()))


def test_what_a_policy_names_must_be_there() -> None:
    with pytest.raises(InvalidModel, match="has no Bottleneck; its modules are Block, ModuleList, Net"):
        names(Net(), "class:Bottleneck")
    with pytest.raises(InvalidModel, match="has no module haed"):
        names(Net(), "auto + haed")
    with pytest.raises(InvalidModel, match="blocks is a ModuleList, which has no forward"):
        names(Net(), "none + blocks")


def test_a_unit_holds_its_own_parameters_and_buffers() -> None:
    spec = model_spec(Net())
    block = spec.unit("blocks.1")
    assert [(p.name, p.shape) for p in block.params] == [
        ("blocks.1.scale", (4,)),
        ("blocks.1.inner.weight", (4, 4)),
        ("blocks.1.inner.bias", (4,)),
    ]
    assert [(b.name, b.dtype, b.trainable) for b in block.buffers] == [("blocks.1.calls", "int64", False)]
    assert [p.name for p in spec.unit(ROOT).params] == ["embed.weight", "head.weight"]


def test_a_parameter_tied_across_units_belongs_to_the_root() -> None:
    net = Net()
    net.blocks[2].inner.weight = net.blocks[0].inner.weight
    root = model_spec(net).unit(ROOT)
    tied = next(p for p in root.params if p.aliases)
    assert (tied.name, tied.aliases) == ("blocks.0.inner.weight", ("blocks.2.inner.weight",))


def test_a_parameter_tied_inside_a_unit_stays_in_it() -> None:
    net = Net()
    net.blocks[0].again = net.blocks[0].inner
    block = model_spec(net).unit("blocks.0")
    assert [p.aliases for p in block.params if p.aliases] == [
        ("blocks.0.again.weight",),
        ("blocks.0.again.bias",),
    ]


def test_a_tied_parameter_goes_to_the_lowest_unit_above_all_its_users() -> None:
    net = nn.ModuleList(nn.ModuleDict({"a": Block(), "b": Block()}) for _ in range(2))
    net.add_module("pair", PairOfBlocks())
    net.pair.second.inner.weight = net.pair.first.inner.weight
    spec = model_spec(net, policy="class:Block,PairOfBlocks")
    assert "pair.first.inner.weight" in [p.name for p in spec.unit("pair").params]


class PairOfBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()


def test_a_unit_that_is_registered_twice_is_one_unit() -> None:
    net = Net()
    net.blocks.append(net.blocks[0])
    spec = model_spec(net)
    assert [unit.name for unit in spec.units] == [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    assert spec.unit("blocks.0").params[0].aliases == ("blocks.3.scale",)


def test_frozen_parameters_are_not_trainable() -> None:
    net = Net()
    net.embed.requires_grad_(False)
    assert [p.trainable for p in model_spec(net).unit(ROOT).params] == [False, True]


def test_the_call_order_is_as_registered() -> None:
    assert model_spec(Net()).call_order == (ROOT, "blocks.0", "blocks.1", "blocks.2")


trees = st.recursive(
    st.just("leaf"),
    lambda children: st.lists(children, min_size=1, max_size=3),
    max_leaves=10,
)


class Node(nn.Module):
    def __init__(self, tree: object, pool: list[nn.Parameter], ties: st.DataObject) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(ties.draw(st.integers(0, 3)), device="meta"))
        pool.append(self.own)
        self.tied = ties.draw(st.sampled_from(pool))
        children = tree if isinstance(tree, list) else []
        self.parts = nn.ModuleList(Node(child, pool, ties) for child in children)


@given(trees, st.sampled_from(["auto", "leaf", "none", "min-params:2", "class:Node"]), st.data())
def test_every_parameter_is_in_exactly_one_unit_that_covers_all_its_users(
    tree: object, policy: str, data: st.DataObject
) -> None:
    model = Node(tree, [], data)
    spec = model_spec(model, policy=policy)
    # The spec itself refuses a path that is in two units.
    paths = {path for unit in spec.units for p in unit.params for path in (p.name, *p.aliases)}
    assert paths == {path for path, _ in model.named_parameters(remove_duplicate=False)}
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    for unit in spec.units:
        prefix = "" if unit.name == ROOT else unit.name + "."
        assert all(path.startswith(prefix) for p in unit.params for path in (p.name, *p.aliases))
