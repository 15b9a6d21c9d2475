"""`muon` by name: torch's Muon for matrices of blocks, its AdamW for the rest."""

import copy

import pytest
import torch
from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.models.tasks import cross_entropy
from shardwise.program.spec.block_matrices import block_matrices, is_block_matrix
from shardwise.program.units import model_spec
from shardwise.training.config.config import InvalidConfig, TrainConfig
from shardwise.training.config.config_sections import OptimizerSection
from shardwise.training.loop.optimizers import make_optimizer

SHAPE = GPTShape(num_layers=2, width=16, num_heads=2, vocab_size=32, max_seq=8, vocab_multiple=1)


def trained(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for step in range(4):
        tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(step))
        cross_entropy(model, (tokens[:, :-1], tokens[:, 1:])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_it_gives_the_bits_of_torchs_two_optimizers() -> None:
    torch.manual_seed(0)
    model = build_model(SHAPE)
    twin = copy.deepcopy(model)
    section = OptimizerSection(name="muon", lr=1e-2, weight_decay=0.2, momentum=0.8, ns_steps=3, betas=(0.8, 0.9))
    trained(model, [make_optimizer(model, section)])
    named = dict(twin.named_parameters())
    matrices = [p for name, p in named.items() if "blocks." in name and p.dim() == 2]
    others = [
        {"params": [p for name, p in named.items() if "blocks." not in name and p.dim() == 2]},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert len(matrices) == 8
    trained(
        twin,
        [
            torch.optim.Muon(
                matrices, lr=1e-2, weight_decay=0.2, momentum=0.8, ns_steps=3, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=1e-2, weight_decay=0.2, betas=(0.8, 0.9)),
        ],
    )
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_its_state_is_loaded_and_training_goes_on_alike() -> None:
    torch.manual_seed(0)
    model = build_model(SHAPE)
    section = OptimizerSection(name="muon", lr=1e-2)
    optimizer = make_optimizer(model, section)
    trained(model, [optimizer])
    twin = copy.deepcopy(model)
    other = make_optimizer(twin, section)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trained(model, [optimizer])
    trained(twin, [other])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in twin.state_dict().items())


def test_a_closure_and_hooks_are_called_once_per_step() -> None:
    model = build_model(SHAPE)
    # Its class has hooks of its own from here on.
    torch.optim.AdamW(build_model(SHAPE).parameters())
    optimizer = make_optimizer(model, OptimizerSection(name="muon"))
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> float:
        called.append("closure")
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert called == ["before", "closure", "after"]


def test_a_model_of_matrices_alone_has_no_adamw() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2))
    optimizer = make_optimizer(model, OptimizerSection(name="muon"))
    assert [group["update"] for group in optimizer.param_groups] == ["muon"]
    for parameter in model.parameters():
        parameter.grad = torch.randn(4, 4)
    optimizer.step()
    assert all(set(state) == {"momentum_buffer"} for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("name", "shape", "takes"),
    [
        ("blocks.3.attention.qkv.weight", (6, 2), True),
        ("model.layers.11.mlp.up_proj.weight", (6, 2), True),
        ("blocks.3.mlp.0.weight", (6, 2), True),
        ("blocks.3.attention.qkv.bias", (6,), False),
        ("blocks.3.experts.weight", (4, 6, 2), False),
        ("embed.weight", (6, 2), False),
        ("lm_head.weight", (6, 2), False),
        ("head.1.weight", (6, 2), False),
        ("0.weight", (6, 2), False),
    ],
)
def test_only_matrices_of_layers_in_numbered_blocks_are_muons(name: str, shape: tuple[int, ...], takes: bool) -> None:
    assert is_block_matrix(name, shape) is takes


def test_the_planner_takes_the_same_parameters_for_matrices() -> None:
    model = build_model(SHAPE)
    model.get_submodule("blocks.0").requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerSection(name="muon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = [names[id(p)] for g in optimizer.param_groups if g["update"] == "muon" for p in g["params"]]
    assert matrices == block_matrices(model_spec(model))
    assert len(matrices) == 4


def test_a_model_without_such_matrices_is_one_line() -> None:
    with pytest.raises(InvalidModel, match=r"^optimizer muon: Sequential has no matrix in a layer of a numbered block"):
        make_optimizer(nn.Sequential(nn.Linear(2, 2)), OptimizerSection(name="muon"))


def test_options_of_other_optimizers_and_torchs_fully_shard_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="adamw has no ns_steps, only muon"):
        OptimizerSection(ns_steps=3)
    with pytest.raises(InvalidConfig, match="nesterov = true needs optimizer.momentum above 0"):
        OptimizerSection(name="muon", nesterov=True, momentum=0.0)
    assert OptimizerSection(name="muon", nesterov=True).options() == {"nesterov": True}
    data = {
        "task": {"model": "gpt-tiny"},
        "plan": {"engine": "torch", "strategy": "fsdp", "micro_batch": 1},
        "optimizer": {"name": "muon"},
        "train": {"steps": 1},
        "run": {"folder": "x"},
    }
    with pytest.raises(InvalidConfig, match="fully_shard gives Muon slices of matrices; set plan.engine = 'shardwise'"):
        TrainConfig.from_dict(data)
