"""Mistakes end in one clear line on every rank: never a crash, never silence, never a hang."""

import copy
import io
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from cases import MODELS, sgd
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from training import line, make_collectives
from whole import in_turn, whole

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.engine import engine_of
from shardwise.engines import clip_grad_norm_, prepare
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh


def trained(strategy: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, batch = MODELS["gpt"]()
    optimizer = sgd(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy))
    for step in range(2):
        cross_entropy(model, batch(step, rank)).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, batch


def reads_sharded(rank: int, strategy: str) -> None:
    model, optimizer, _ = trained(strategy, rank)
    weight = model.blocks[0].attention.qkv.weight
    # What is about the parameter is answered.
    assert (weight.shape, weight.dim(), weight.numel(), weight.dtype) == ((54, 18), 2, 972, torch.float32)
    assert weight.requires_grad
    assert isinstance(weight, nn.Parameter)
    assert "Resting" in repr(weight)
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    # What is in it is not here.
    for read in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight[0],
        lambda: weight.detach(),
        lambda: weight.tolist(),
        lambda: weight.copy_(torch.zeros(54, 18)),
        lambda: torch.nn.init.zeros_(weight),
        lambda: model.blocks[0].state_dict()["attention.qkv.weight"].clone(),
        lambda: torch.save(model.blocks[0].state_dict(), io.BytesIO()),
    ):
        assert "blocks.0." in line(read)
        assert "full_state_dict" in line(read)
    assert "clip_grad_norm_" in line(lambda: weight.grad)
    assert "clip_grad_norm_" in line(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    clip_grad_norm_(model, 1.0)
    optimizer.step()


@pytest.mark.parametrize("strategy", ["fsdp", *whole("shard_grad_op")])
def test_reading_what_a_rank_does_not_hold_is_refused(strategy: str) -> None:
    run_ranks(reads_sharded, num_ranks=2, args=(strategy,))


def reads_in_lists(rank: int, strategy: str) -> None:
    model, _, _ = trained(strategy, rank)
    parameters = list(model.parameters())
    for read in (
        lambda: torch.cat([parameters[0], parameters[0]]),
        lambda: torch._foreach_norm(parameters),
        lambda: torch.sum(input=parameters[0]),
    ):
        assert "embed.weight is sharded and freed" in line(read)


@pytest.mark.ledger("read-in-a-list", outcome="refused")
@pytest.mark.parametrize("strategy", ["shard_grad_op", *whole("fsdp")])
def test_reading_parameters_through_a_list_or_a_keyword_is_refused(strategy: str) -> None:
    run_ranks(reads_in_lists, num_ranks=2, args=(strategy,))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Direct(nn.Module):
    """As some models do it: `layer.forward(x)` in place of `layer(x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


def calls_forward(rank: int, strategy: str) -> None:
    model = Direct()
    prepare(model, None, Plan(strategy=strategy))
    refused = line(lambda: model(torch.ones(2, 4)))
    assert "layers.0.forward is called directly" in refused
    assert "call the module itself, layers.0(…)" in refused


@pytest.mark.parametrize("strategy", ["fsdp", *whole("shard_grad_op")])
def test_a_unit_whose_forward_is_called_directly_is_refused_in_those_words(strategy: str) -> None:
    run_ranks(calls_forward, num_ranks=2, args=(strategy,))


def edits_in_lists(rank: int, strategy: str) -> None:
    model, batch = MODELS["gpt"]()
    plain = copy.deepcopy(model)
    optimizer, other = sgd(model.parameters()), sgd(plain.parameters())
    prepare(model, optimizer, Plan(strategy=strategy), collectives=make_collectives(late=True, rank=rank))
    for step in range(3):
        cross_entropy(model, batch(step, rank)).backward()
        for micro_batch in range(2):
            (cross_entropy(plain, batch(step, micro_batch)) * 0.5).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        # Under zero1 the update's gather is still under way here.
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)
            torch._foreach_mul_(list(plain.parameters()), 0.5)
    whole = model.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())


@pytest.mark.ledger("edit-in-a-list", outcome="right")
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_editing_parameters_through_a_list_right_after_a_step_is_not_lost(strategy: str) -> None:
    run_ranks(edits_in_lists, num_ranks=2, args=(strategy,))


def reads_replicated(rank: int) -> None:
    model, optimizer, _ = trained("zero2", rank)
    assert "clip_grad_norm_" in line(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    # Gathered after the update: a read waits for it.
    values = [p.detach().clone() for p in model.parameters()]
    for value, (name, _) in zip(values, model.named_parameters(), strict=True):
        assert torch.equal(value, model.state_dict()[name])
    for strategy in ("ddp", "zero1"):
        model, optimizer, _ = trained(strategy, rank)
        # Replicated gradients are there to read, and clipping them clips what is stepped.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(norm, clip_grad_norm_(model, 1e9))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model, 1e9), torch.tensor(0.5))
        if strategy == "ddp":
            assert optimizer.param_groups[0]["params"] == list(model.parameters())
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])


def test_what_is_replicated_can_be_read() -> None:
    run_ranks(reads_replicated, num_ranks=2)


def steps_between(rank: int) -> None:
    for strategy in ("ddp", "zero2", "fsdp"):
        model, optimizer, batch = trained(strategy, rank)
        loss = cross_entropy(model, batch(0, rank))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        cross_entropy(model, batch(0, rank)).backward()


def test_a_step_between_forward_and_backward_is_torchs_own_error() -> None:
    run_ranks(steps_between, num_ranks=2)


def bad_arguments(rank: int) -> None:
    def fresh() -> nn.Module:
        return MODELS["gpt"]()[0]

    assert "matches no unit; the units are (root), blocks.0" in line(
        lambda: prepare(fresh(), None, Plan(overrides={"head": "ddp"}))
    )
    assert "mesh 2×2 is 4 ranks, but the job has 2" in line(
        lambda: prepare(fresh(), None, Plan(mesh=Mesh(replicate=2, shard=2)))
    )
    assert "has no Bottleneck" in line(lambda: prepare(fresh(), None, Plan(units="class:Bottleneck")))
    assert "what every rank holds whole stays on the device" in line(
        lambda: prepare(fresh(), None, Plan(strategy="zero1", offload_states=True))
    )
    assert "keep_fp32: norm5 matches no module" in line(
        lambda: prepare(fresh(), None, Plan(precision="bf16", keep_fp32=("norm5",)))
    )
    assert "names head.weight and not embed.weight, one parameter" in line(
        lambda: prepare(fresh(), None, Plan(precision="bf16", keep_fp32=("head",)))
    )
    model = fresh()
    prepare(model, None, Plan())
    assert "already" in line(lambda: prepare(model, None, Plan()))
    assert "pickled" in line(lambda: pickle.dumps(model))
    assert "cannot be moved or cast" in line(lambda: model.double())
    other = nn.Linear(2, 2)
    assert "that is not the model's" in line(
        lambda: prepare(m := fresh(), torch.optim.SGD([*m.parameters(), *other.parameters()], lr=0.1), Plan())
    )
    stepped = fresh()
    optimizer = torch.optim.AdamW(stepped.parameters())
    cross_entropy(stepped, MODELS["gpt"]()[1](0, 0)).backward()
    optimizer.step()
    assert "has stepped before" in line(lambda: prepare(stepped, optimizer, Plan()))


def test_what_cannot_run_is_refused_on_every_rank() -> None:
    run_ranks(bad_arguments, num_ranks=2)


class Whole(torch.optim.Optimizer):
    """An update that looks at the whole parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad.shape == parameter.shape
                parameter.sub_(parameter.grad / (1 + parameter.grad.norm()), alpha=group["lr"])


def whole_or_slices(rank: int) -> None:
    for plan, any_optimizer in (
        (Plan(strategy="ddp"), False),
        (Plan(strategy="zero1"), False),
        (Plan(strategy="fsdp"), True),
    ):
        model, batch = MODELS["gpt"]()
        shapes = [p.shape for p in model.parameters()]
        optimizer = Whole(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepare(model, optimizer, plan, any_optimizer=any_optimizer)
        held = [p.shape for p in optimizer.param_groups[0]["params"]]
        assert (set(held) <= set(shapes)) is not any_optimizer
        assert (held == shapes) is (plan.strategy == "ddp")
        cross_entropy(model, batch(0, rank)).backward()
        optimizer.step()


def test_an_optimizer_that_needs_whole_parameters_gets_them_unless_it_is_said_not_to() -> None:
    run_ranks(whole_or_slices, num_ranks=2)


class Buffers(nn.Module):
    def __init__(self, *names: str, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        for name in names:
            self.register_buffer(name, torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def differ(rank: int, what: str, engine: str) -> str:
    options: dict[str, Any] = {
        "learning rate": {"lr": 1e-3 * (1 + rank)},
        "options": {"amsgrad": bool(rank)},
    }
    kind = torch.optim.Adam if rank and what == "class" else torch.optim.AdamW
    model = MODELS["gpt"]()[0]
    optimizer = kind(model.parameters(), **options.get(what, {}))
    return line(lambda: shardwise.prepare(model, optimizer, Plan(strategy="ddp", engine=engine)))


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        pytest.param(
            "learning rate",
            "lr = 0.001 | optimizer.param_groups[0] lr = 0.002",
            marks=pytest.mark.ledger("ranks-learning-rate", outcome="refused"),
        ),
        pytest.param(
            "class",
            "optimizer = torch.optim.adamw.AdamW | optimizer = torch.optim.adam.Adam",
            marks=pytest.mark.ledger("ranks-optimizer-class", outcome="refused"),
        ),
        pytest.param(
            "options",
            "amsgrad = False | optimizer.param_groups[0] amsgrad = True",
            marks=pytest.mark.ledger("ranks-optimizer-options", outcome="refused"),
        ),
    ],
)
def test_ranks_with_other_optimizers_say_so(what: str, expected: str, engine: str) -> None:
    zero, one = run_ranks(differ, num_ranks=2, args=(what, engine))
    assert expected in zero
    assert zero == one


def differ_late(rank: int) -> str:
    """An optimizer that was made later is compared at its first step."""
    model, batch = MODELS["gpt"]()
    prepare(model, None, Plan(strategy="ddp"))
    late = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    cross_entropy(model, batch(0, rank)).backward()
    return line(late.step)


def test_ranks_with_other_optimizers_made_later_say_so() -> None:
    zero, one = run_ranks(differ_late, num_ranks=2)
    assert "different optimizers: optimizer.param_groups[0] lr = 0.1 | optimizer.param_groups[0] lr = 1.1" in zero
    assert zero == one


def buffers_differ(rank: int, what: str) -> str:
    order = ("b", "a") if rank else ("a", "b")
    model = Buffers(*order) if what == "order" else Buffers("a", size=3 + rank)
    return line(lambda: prepare(model, None, Plan()))


@pytest.mark.parametrize(
    ("what", "other"),
    [
        pytest.param("order", "b [3]", marks=pytest.mark.ledger("ranks-buffers-order", outcome="refused")),
        pytest.param("shape", "a [4]", marks=pytest.mark.ledger("ranks-buffers-shape", outcome="refused")),
    ],
)
def test_ranks_with_other_buffers_say_so(what: str, other: str) -> None:
    zero, one = run_ranks(buffers_differ, num_ranks=2, args=(what,))
    assert f"buffer a [3] torch.float32 | buffer {other} torch.float32" in zero
    assert zero == one


def adds_a_group(rank: int, strategy: str, precision: str) -> None:
    model, batch = MODELS["gpt"]()
    first, *others = model.parameters()
    optimizer = sgd(others)
    prepare(model, optimizer, Plan(strategy=strategy, precision=precision))
    name = next(name for name, p in model.named_parameters() if p is first)
    before = model.state_dict()[name]
    optimizer.add_param_group({"params": [first], "lr": 0.2})
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()[name], before)
    assert optimizer.state_dict()["param_groups"][1]["params"] == [len(others)]


@pytest.mark.ledger("late-param-group", outcome="right")
@pytest.mark.parametrize(
    ("precision", "strategy"), in_turn(["fp32", "bf16"], "ddp", "fsdp", every=("ddp", "zero1", "fsdp"))
)
def test_a_param_group_that_is_added_later_trains(strategy: str, precision: str) -> None:
    run_ranks(adds_a_group, num_ranks=2, args=(strategy, precision))


def adds_a_wrong_group(rank: int, strategy: str) -> None:
    model, optimizer, _ = trained(strategy, rank)
    first = next(iter(model.parameters()))
    assert "it is in another group" in line(lambda: optimizer.add_param_group({"params": first}))
    new = nn.Parameter(torch.zeros(3))
    assert "shape (3,): it is not the prepared model's" in line(lambda: optimizer.add_param_group({"params": new}))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *whole("zero1")])
def test_a_param_group_that_holds_what_it_cannot_is_refused(strategy: str) -> None:
    run_ranks(adds_a_wrong_group, num_ranks=2, args=(strategy,))


class Stepped(nn.Module):
    """A model that can be trained through a method other than forward; `own`: it has parameters outside of blocks."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 1) if own else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).square().mean()

    def calls_itself(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def trains_past_forward(rank: int, strategy: str, units: str) -> None:
    x = torch.full((2, 5), 1.0 + rank)
    model = Stepped(own=strategy != "fsdp")
    optimizer = sgd(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy, units=units))
    for _ in range(2):
        assert "call the model itself, model(x)" in line(lambda: model.training_step(x).backward())
        optimizer.zero_grad()
        # A step in between does not hide it, and trains.
        before = model.state_dict()
        loss = model.calls_itself(x)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = model.state_dict()
        assert not any(torch.equal(before[name], after[name]) for name in before)
    assert len({str(other) for other in exchange({name: value.tolist() for name, value in after.items()})}) == 1


@pytest.mark.ledger("method-other-than-forward", outcome="refused")
@pytest.mark.parametrize(
    ("strategy", "units"),
    [("zero2", "none"), ("fsdp", "auto"), *whole(("ddp", "none"), ("ddp", "auto"), ("zero1", "auto"))],
)
def test_training_through_another_method_than_forward_is_refused(strategy: str, units: str) -> None:
    run_ranks(trains_past_forward, num_ranks=2, args=(strategy, "class:Linear" if units == "auto" else "class:Stepped"))


def add_head(model: nn.Module) -> None:
    model.adapter = nn.Linear(4, 4)


def replace_weight(model: nn.Module) -> None:
    model.norm.weight = nn.Parameter(torch.ones(18))


def add_unnoticed(model: nn.Module) -> None:
    model.norm._parameters["scale"] = nn.Parameter(torch.ones(18))


def adds_parameters(rank: int, strategy: str) -> None:
    for add, name in ((add_head, "adapter.weight (4, 4)"), (replace_weight, "norm.weight (18,)")):
        for num_steps in (0, 1):
            model, batch = MODELS["gpt"]()
            optimizer = sgd(model.parameters())
            prepare(model, optimizer, Plan(strategy=strategy))
            for step in range(num_steps):
                cross_entropy(model, batch(step, rank)).backward()
                optimizer.step()
            add(model)
            message = f"{name} was added to the model after shardwise.prepare"
            assert message in line(lambda: model(batch(1, rank)[0]))  # noqa: B023
            assert message in line(model.state_dict)
    model, batch = MODELS["gpt"]()
    prepare(model, None, Plan(strategy=strategy))
    add_unnoticed(model)
    assert "norm.scale (18,) was added" in line(lambda: model(batch(0, rank)[0]))


@pytest.mark.ledger("parameters-added", outcome="refused")
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
def test_parameters_that_are_added_after_prepare_are_refused(strategy: str) -> None:
    run_ranks(adds_parameters, num_ranks=2, args=(strategy,))


def by_vector(model: nn.Module) -> None:
    values = torch.zeros(sum(p.numel() for p in model.parameters()))
    torch.nn.utils.vector_to_parameters(values, model.parameters())


def by_data(model: nn.Module) -> None:
    model.norm.weight.data = torch.zeros(18)


def by_set(model: nn.Module) -> None:
    with torch.no_grad():
        model.norm.weight.set_(torch.zeros(18))


def by_cast(model: nn.Module) -> None:
    model.norm.double().float()


def tears_out(rank: int, strategy: str) -> None:
    for tear in (by_vector, by_data, by_set, by_cast):
        model, batch = MODELS["gpt"]()
        plain = copy.deepcopy(model)
        optimizer, other = sgd(model.parameters()), sgd(plain.parameters())
        prepare(model, optimizer, Plan(strategy=strategy))
        for step in range(3):
            cross_entropy(model, batch(step, rank)).backward()
            for micro_batch in range(2):
                (cross_entropy(plain, batch(step, micro_batch)) * 0.5).backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            if step == 1:
                tear(model)
                tear(plain)
                with pytest.raises(ShardwiseError, match="weight was given other memory after shardwise.prepare"):
                    model.state_dict()
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    # Values that are put aside and come back are where they were.
    model, optimizer, batch = trained(strategy, rank)
    optimizer.step()
    kept = model.norm.weight.data
    model.norm.weight.data = torch.zeros(18)
    model.norm.weight.data = kept
    cross_entropy(model, batch(2, rank)).backward()


@pytest.mark.ledger("parameters-torn-out", outcome="right")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", *whole("zero1")])
def test_parameters_that_are_torn_out_of_their_buffers_are_trained_with_their_new_values(strategy: str) -> None:
    run_ranks(tears_out, num_ranks=2, args=(strategy,))


def keeps_other_memory(rank: int) -> None:
    model, optimizer, _ = trained("zero1", rank)
    kept = torch.zeros(18)
    model.norm.weight.data = kept
    refused = line(optimizer.step)
    assert "norm.weight was given the memory of a tensor that is still in use" in refused
    assert "p.data.copy_" in refused
    model.norm.weight.data = model.norm.bias.data
    assert "still in use" in line(optimizer.step)
    model.norm.weight.data = torch.zeros(17)
    assert "torch.float32 (17,) on cpu in place of torch.float32 (18,)" in line(optimizer.step)


def test_memory_that_a_parameter_would_share_or_that_does_not_fit_is_refused() -> None:
    run_ranks(keeps_other_memory, num_ranks=2)


def distributed_already(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = MODELS["gpt"]()[0]
    fully_shard(sharded, mesh=mesh)
    assert "is a DTensor (fully_shard, tensor parallel)" in line(lambda: prepare(sharded, None, Plan()))
    replicated = DistributedDataParallel(MODELS["gpt"]()[0])
    assert "the model is a DistributedDataParallel" in line(lambda: prepare(replicated, None, Plan()))


@pytest.mark.ledger("model-of-dtensors", outcome="refused")
def test_a_model_that_is_distributed_already_is_refused() -> None:
    run_ranks(distributed_already, num_ranks=2)


def wrapper_tensors(rank: int) -> None:
    quantized = nn.Sequential(nn.Linear(3, 3))
    quantized[0].weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    assert "0.weight is a torch.testing._internal.two_tensor.TwoTensor" in line(
        lambda: prepare(quantized, None, Plan())
    )


@pytest.mark.ledger("model-of-tensor-subclasses", outcome="refused")
def test_a_model_of_wrapper_tensors_is_refused() -> None:
    run_ranks(wrapper_tensors, num_ranks=2)


def uses_what_is_prepared(rank: int, how: str, strategy: str) -> None:
    encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    first, plan = nn.Sequential(encoder, nn.Linear(4, 2)), Plan(strategy=strategy)
    prepare(first, None, plan)
    if how == "shares":
        second = nn.Sequential(encoder, nn.Linear(4, 3))
        message = line(lambda: prepare(second, None, plan))
        assert "0.0.weight is part of another model that has been through" in message
    elif how == "holds":
        outer = nn.Sequential(nn.Linear(4, 4), first)
        message = line(lambda: prepare(outer, None, plan))
        assert "1 has been through shardwise.prepare already: prepare the outermost" in message
    else:
        for wrapper in (DistributedDataParallel, nn.DataParallel):
            message = line(lambda: wrapper(first))  # noqa: B023
            assert f"{wrapper.__name__} around a model that has been through shardwise.prepare" in message
    # A copy is an ordinary model.
    prepare(copy.deepcopy(first), None, plan)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("shares", marks=pytest.mark.ledger("shared-encoder", outcome="refused")),
        pytest.param("holds", marks=pytest.mark.ledger("prepared-inside", outcome="refused")),
        pytest.param("wraps", marks=pytest.mark.ledger("wrapped-in-ddp", outcome="refused")),
    ],
)
def test_preparing_or_wrapping_what_is_prepared_is_refused(how: str, strategy: str) -> None:
    run_ranks(uses_what_is_prepared, num_ranks=2, args=(how, strategy))


def in_float64(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    for engine in ("shardwise", "torch"):
        for precision in ("fp32", "bf16", "fp16"):
            refused = line(partial(shardwise.prepare, model, None, Plan(precision=precision, engine=engine)))
            assert refused.startswith(f"1.weight is float64, and precision = '{precision}' would make it float32")
            assert "set precision = 'native'" in refused
    prepare(model, None, Plan(precision="native"))
    assert model.state_dict()["1.weight"].dtype is torch.float64


@pytest.mark.ledger("float64-model", outcome="refused")
def test_a_float64_model_is_made_float32_under_no_precision() -> None:
    run_ranks(in_float64, num_ranks=1)


def disagree(rank: int) -> list[str]:
    wide = nn.Sequential(nn.Linear(3, 4 + rank))
    return [
        line(lambda: prepare(MODELS["gpt"]()[0], None, Plan(prefetch=rank))),
        line(lambda: prepare(wide, None, Plan())),
        line(lambda: prepare(MODELS["gpt"]()[0], None, Plan(overrides={"x": "ddp"} if rank else {}))),
    ]


def test_ranks_that_disagree_say_so_and_do_not_hang() -> None:
    zero, one = run_ranks(disagree, num_ranks=2)
    expected = "rank 0 and rank 1 were given different plans, models or optimizers: prefetch = 0 | prefetch = 1"
    assert zero[0] == one[0] == expected
    assert "0.weight [4, 3]" in zero[1]
    assert "0.weight [5, 3]" in one[1]
    assert zero[2].startswith("rank 1 could not continue: overrides.x matches no unit")
    assert one[2].startswith("overrides.x matches no unit")


def stale(rank: int) -> None:
    """An optimizer that was made before and not handed over is recognised at its first step."""
    model, batch = MODELS["gpt"]()
    forgotten = sgd(model.parameters())
    prepare(model, None, Plan(strategy="fsdp"))
    before = model.state_dict()["blocks.0.attention.qkv.weight"].clone()
    cross_entropy(model, batch(0, rank)).backward()
    forgotten.step()
    assert not torch.equal(model.state_dict()["blocks.0.attention.qkv.weight"], before)


def test_an_optimizer_that_was_not_handed_over_still_trains() -> None:
    run_ranks(stale, num_ranks=2)


def scaled(rank: int) -> None:
    _, optimizer, _ = trained("zero1", rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    assert "GradScaler cannot see an overflow" in line(lambda: scaler.step(optimizer))


def test_torchs_grad_scaler_is_refused_where_it_would_see_a_slice_only() -> None:
    run_ranks(scaled, num_ranks=2)


class OwnUnscale(torch.amp.GradScaler):
    """Reads gradients in its own way, as a library's scaler may."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return {found_inf.device: found_inf}


class Wrapped:
    """Around an optimizer, with other parameters: only the step inside shows whose it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = optimizer.step
        self.param_groups: list[Any] = []


def scaled_otherwise(rank: int) -> None:
    _, optimizer, _ = trained("zero1", rank)
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), OwnUnscale("cpu")):
        scaler.scale(torch.ones(()))
        for stepped in (optimizer, Wrapped(optimizer)):
            assert "GradScaler cannot see an overflow" in line(partial(scaler.step, stepped))
    # Refused steps leave nothing behind.
    optimizer.step()


def test_a_step_that_any_scaler_of_torch_calls_is_refused_on_slices() -> None:
    run_ranks(scaled_otherwise, num_ranks=2)


def overflows_on_one_rank(rank: int, strategy: str, handed_over: bool) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = sgd(model.parameters())
    prepare(model, optimizer if handed_over else None, Plan(strategy=strategy))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(cross_entropy(model, batch(0, rank))).backward()
    if rank == 0 and handed_over:
        part = next(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        part.grad.fill_(float("inf"))
    # Also where the step would be skipped, and in whatever is called first.
    assert "GradScaler cannot see an overflow" in line(lambda: scaler.step(optimizer))
    assert "GradScaler cannot see an overflow" in line(lambda: scaler.unscale_(optimizer))


@pytest.mark.ledger("grad-scaler-of-torch", outcome="refused")
@pytest.mark.parametrize(
    ("strategy", "handed_over"), [("zero1", True), ("fsdp", False), *whole(("zero2", True), ("fsdp", True))]
)
def test_torchs_grad_scaler_is_refused_on_all_ranks_at_once(strategy: str, handed_over: bool) -> None:
    run_ranks(overflows_on_one_rank, num_ranks=2, args=(strategy, handed_over))


def clips_in_bf16(rank: int, strategy: str) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = sgd(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy, precision="bf16", keep_fp32=("norm",)))
    assert model.blocks[0].attention.qkv.weight.grad is None
    for step in range(2):
        cross_entropy(model, batch(step, rank)).backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        before = clip_grad_norm_(model, 1e9)
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3), before)
        # What the optimizer steps is clipped.
        torch.testing.assert_close(clip_grad_norm_(model, 1e9), torch.tensor(1e-3))
        assert model.blocks[0].attention.qkv.weight.detach().isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
        assert model.blocks[0].attention.qkv.weight.grad is None
        with torch.no_grad():
            model(batch(step, rank)[0])


@pytest.mark.ledger("clip-by-torch-in-bf16", outcome="right")
@pytest.mark.parametrize("strategy", ["zero1", *whole("ddp")])
def test_bf16_parameters_show_their_averaged_fp32_gradients(strategy: str) -> None:
    run_ranks(clips_in_bf16, num_ranks=2, args=(strategy,))


def steps_after_a_failure(rank: int, strategy: str, when: int) -> None:
    model, batch = MODELS["gpt"]()
    optimizer = sgd(model.parameters())
    prepare(model, optimizer, Plan(strategy=strategy))

    def step(number: int) -> None:
        cross_entropy(model, batch(number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for number in range(when):
        step(number)
    before = model.state_dict()
    part = model.blocks[1].feed_forward.register_forward_hook(lambda *call: call[-1].register_hook(fail) and None)
    loss = cross_entropy(model, batch(when, rank))
    part.remove()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert "a step right after a backward that raised, whose gradients are not whole" in line(optimizer.step)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Cleared, the step can be run again, on every rank alike.
    optimizer.zero_grad()
    step(when)
    sums = {name: value.sum().item() for name, value in model.state_dict().items()}
    assert exchange(sums) == [sums, sums]


@pytest.mark.ledger("backward-raised", outcome="refused")
@pytest.mark.parametrize(
    ("when", "strategy"), in_turn([0, 1], "zero2", "fsdp", every=("ddp", "zero1", "zero2", "fsdp"))
)
def test_a_step_right_after_a_backward_that_raised_is_refused(strategy: str, when: int) -> None:
    run_ranks(steps_after_a_failure, num_ranks=2, args=(strategy, when))


def subtle(rank: int) -> None:
    model, optimizer, batch = trained("fsdp", rank)
    optimizer.zero_grad()
    assert "gradients of gradients" in line(lambda: cross_entropy(model, batch(0, rank)).backward(create_graph=True))
    cross_entropy(model, batch(0, rank)).backward()

    reentrant, batch = MODELS["gpt"]()
    block = reentrant.blocks[1]
    prepare(reentrant, None, Plan(units="class:Block"))
    whole = block.forward
    block.forward = lambda x: torch.utils.checkpoint.checkpoint(block.feed_forward, whole(x), use_reentrant=True)
    assert "two gradients in one backward" in line(lambda: cross_entropy(reentrant, batch(0, rank)).backward())
    other, _ = MODELS["gpt"]()
    other.blocks[1] = Reentrant(other.blocks[1])
    prepare(other, None, Plan(units="class:Block"))
    assert "use_reentrant=False" in line(lambda: cross_entropy(other, batch(0, rank)).backward())


class Reentrant(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)


def test_what_backward_cannot_do_is_refused() -> None:
    run_ranks(subtle, num_ranks=2)


def alone(rank: int) -> None:
    model, _, _ = trained("fsdp", rank)
    engine_of(model).core.followed.limit_seconds = 0.3
    if rank == 0:
        assert line(model.state_dict) == "rank 1, 2 did not come to state_dict within 0 s: call it on every rank"
    # Afterwards all of them may come.
    dist.barrier()
    engine_of(model).core.followed.limit_seconds = 60.0
    assert model.state_dict().keys() == MODELS["gpt"]()[0].state_dict().keys()


def test_a_state_dict_on_one_rank_alone_names_the_ranks_that_did_not_come() -> None:
    run_ranks(alone, num_ranks=3)


def torn_out_of_many(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepare(model, optimizer, Plan(strategy="zero1"))
    x = torch.ones(1, 2)
    for _ in range(2):
        model(x).sum().backward()
        model[-1].bias.data = torch.full((2,), 7.0)
        assert "99.bias was given other memory" in line(model.state_dict)
        optimizer.step()
        assert model.state_dict()["99.bias"].tolist() == [7.0, 7.0]


def test_a_torn_parameter_among_many_is_found_before_an_update_and_before_it_is_saved() -> None:
    run_ranks(torn_out_of_many, num_ranks=2)
