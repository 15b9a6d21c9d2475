"""Where parameters are replicated (ddp, zero1, zero2), idioms of plain torch work as in one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm
from training import line

import shardwise
from shardwise import Plan

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))


def batch(step: int, number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank of two under a plan; without one, both ranks' work in one process."""

    plan: Plan | None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if self.plan is not None:
            shardwise.prepare(model, optimizer, self.plan)

    def parts(self) -> Iterator[tuple[int, float]]:
        """The ranks whose work is done here, and the weight of their losses."""
        yield from [(0, 0.5), (1, 0.5)] if self.plan is None else [(dist.get_rank(), 1.0)]

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        whole = model.state_dict() if self.plan is None else shardwise.full_state_dict(model)["model"]
        return {name: value.clone() for name, value in whole.items()}


Idiom = Callable[[Job], dict[str, Tensor]]


def run_idiom(rank: int, idiom: Idiom, plan: Plan | None) -> dict[str, Tensor]:
    return idiom(Job(plan=plan))


def refused(rank: int, idiom: Idiom, plan: Plan) -> str:
    return line(lambda: idiom(Job(plan=plan)))


def assert_as_one_process(idiom: Idiom, plan: Plan, *, tolerance: float = 1e-6) -> None:
    (expected,) = run_ranks(run_idiom, num_ranks=1, args=(idiom, None))
    found = run_ranks(run_idiom, num_ranks=2, args=(idiom, plan))
    for name, value in expected.items():
        assert torch.equal(found[0][name], found[1][name]), f"{name} differs between ranks"
        torch.testing.assert_close(found[0][name], value, rtol=tolerance, atol=tolerance)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


# Gradients of gradients


def gradient_penalty(job: Job, *, together: bool) -> dict[str, Tensor]:
    """WGAN-GP: a critic whose gradient with respect to its inputs is to have norm 1."""
    critic = make_model()
    optimizer = sgd(critic)
    job.prepare(critic, optimizer)
    for step in range(3):
        for rank, weight in job.parts():
            real, fake = batch(step, rank), batch(step, rank + 2)
            losses = [-critic(real).mean(), critic(fake).mean()]
            mixed = (0.3 * real + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            losses.append(0.3 * (slope.norm(dim=1) - 1).square().mean())
            for loss in [sum(losses)] if together else losses:
                (weight * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.state(critic)


def penalty_together(job: Job) -> dict[str, Tensor]:
    return gradient_penalty(job, together=True)


def penalty_alone(job: Job) -> dict[str, Tensor]:
    """Its backward begins at a parameter, which has an averaged gradient already."""
    return gradient_penalty(job, together=False)


def gradients_of_parameters(job: Job) -> dict[str, Tensor]:
    model = make_model()
    optimizer = sgd(model)
    job.prepare(model, optimizer)
    for step in range(3):
        for rank, weight in job.parts():
            loss = model(batch(step, rank)).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (weight * (loss + 0.1 * sum(grad.square().sum() for grad in grads))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.state(model)


@pytest.mark.parametrize(
    ("idiom", "strategy"),
    [
        (penalty_together, "zero1"),
        (penalty_alone, "ddp"),
        (penalty_alone, "zero2"),
        (gradients_of_parameters, "ddp"),
        (gradients_of_parameters, "zero2"),
    ],
)
def test_gradients_of_gradients_are_those_of_one_process(idiom: Idiom, strategy: str) -> None:
    assert_as_one_process(idiom, Plan(strategy=strategy))


def test_gradients_of_gradients_of_recomputed_units_are_those_of_one_process() -> None:
    assert_as_one_process(penalty_alone, Plan(strategy="zero1", recompute="full"))


@pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])
def test_gradients_of_gradients_of_sharded_parameters_are_refused(strategy: str) -> None:
    for said in run_ranks(refused, num_ranks=2, args=(penalty_together, Plan(strategy=strategy))):
        assert "gradients of gradients" in said
        assert "use zero2" in said


def graph_in_grads(job: Job) -> dict[str, Tensor]:
    model = make_model()
    job.prepare(model, None)
    try:
        model(batch(0, 0)).mean().backward(create_graph=True)
    finally:
        assert all(parameter.grad is None for parameter in model.parameters())
    return {}


def test_a_graph_behind_averaged_gradients_is_refused_before_any_gradient_changes() -> None:
    for said in run_ranks(refused, num_ranks=2, args=(graph_in_grads, Plan(strategy="ddp"))):
        assert "backward(create_graph=True)" in said
        assert "torch.autograd.grad" in said


# Memory that is replaced


class MomentumEncoder(nn.Module):
    """MoCo: a second encoder that follows the first slowly, by `p.data = …`."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__()
        self.query, self.key = make_model(), make_model()
        self.key.requires_grad_(False)
        self.follows = follows

    @torch.no_grad()
    def follow(self) -> None:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        queries = self.query(x)
        with torch.no_grad():
            if self.follows:
                self.follow()
            keys = self.key(other)
        return (queries - keys).square().mean()


def momentum_encoder(job: Job, *, inside: bool) -> dict[str, Tensor]:
    model = MomentumEncoder(follows=inside)
    optimizer = sgd(model.query)
    job.prepare(model, optimizer)
    for step in range(3):
        for rank, weight in job.parts():
            # In one process the second rank's forward finds it done.
            model.follows = inside and (rank == 0 or job.plan is not None)
            (weight * model(batch(step, rank), batch(step, rank + 2))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not inside:
            model.follow()
    return job.state(model)


def follows_inside(job: Job) -> dict[str, Tensor]:
    return momentum_encoder(job, inside=True)


def follows_after(job: Job) -> dict[str, Tensor]:
    return momentum_encoder(job, inside=False)


@pytest.mark.parametrize(
    ("idiom", "strategy"),
    [(follows_inside, "ddp"), (follows_inside, "zero2"), (follows_after, "zero1"), (follows_after, "zero2")],
)
def test_a_momentum_encoder_may_be_given_other_memory(idiom: Idiom, strategy: str) -> None:
    assert_as_one_process(idiom, Plan(strategy=strategy))


def test_a_sharded_momentum_encoder_is_refused() -> None:
    for said in run_ranks(refused, num_ranks=2, args=(follows_inside, Plan(strategy="fsdp"))):
        assert "is sharded and freed" in said


# Gradients that are read and written between backward and step


def edited_gradients(rank: int, strategy: str, precision: str) -> dict[str, Tensor]:
    """What a bf16 parameter shows is what its master is stepped by."""
    model = make_model()
    optimizer = sgd(model)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, precision=precision))
    for step in range(4):
        # The second backward adds to the first one's averages.
        for number in range(2):
            model(batch(step, rank + 2 * number)).square().mean().backward()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            assert parameter.grad.dtype is torch.float32
            noise = 0.01 * torch.randn(parameter.shape, generator=generator)
            if step % 2:
                parameter.grad.add_(noise)
            else:
                parameter.grad = parameter.grad + noise
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(norm, shardwise.clip_grad_norm_(model, 1e9))
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    return dict(shardwise.full_state_dict(model)["model"])


def test_gradients_that_are_edited_before_a_step_are_stepped_in_bf16_too() -> None:
    # Rounding in bf16 is the same under both, and moves weights by less than an edit does.
    (ddp, _), (zero1, _) = (run_ranks(edited_gradients, num_ranks=2, args=(name, "bf16")) for name in ("ddp", "zero1"))
    plain, _ = run_ranks(edited_gradients, num_ranks=2, args=("ddp", "fp32"))
    for name, value in plain.items():
        assert torch.equal(ddp[name], zero1[name])
        torch.testing.assert_close(ddp[name], value, rtol=0, atol=1e-3)


# torch.func, and steps in hooks


def functional(job: Job) -> dict[str, Tensor]:
    """Values made from the model's own parameters, and gradients per sample of others."""
    model = make_model()
    optimizer = sgd(model)
    job.prepare(model, optimizer)
    norms = []
    for step in range(3):
        for rank, weight in job.parts():
            halves = {name: 0.5 * parameter for name, parameter in model.named_parameters()}
            (weight * functional_call(model, halves, (batch(step, rank),)).square().mean()).backward()

            def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
                return functional_call(model, parameters, (sample[None],)).sum()

            kept = {name: value.detach() for name, value in halves.items()}
            grads = vmap(grad(loss), in_dims=(None, 0))(kept, batch(step, 0))
            norms.append(torch.stack([value.norm() for value in grads.values()]))
        optimizer.step()
        optimizer.zero_grad()
    return {**job.state(model), "norms": norms[-1]}


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_functional_call_and_gradients_per_sample_are_those_of_one_process(strategy: str) -> None:
    assert_as_one_process(functional, Plan(strategy=strategy))


def mapped(job: Job) -> dict[str, Tensor]:
    model = make_model()
    job.prepare(model, None)
    vmap(model)(batch(0, 0)).sum().backward()
    return {}


@pytest.mark.parametrize(
    ("strategy", "cause"), [("ddp", "torch.func.vmap(model), is not synchronised"), ("fsdp", "torch.func transforms")]
)
def test_a_model_that_is_transformed_itself_is_refused_in_those_words(strategy: str, cause: str) -> None:
    for said in run_ranks(refused, num_ranks=2, args=(mapped, Plan(strategy=strategy))):
        assert cause in said


def steps_in_hooks(job: Job) -> dict[str, Tensor]:
    model = make_model()
    job.prepare(model, None)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    model(batch(0, 0)).sum().backward()
    return {}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_in_a_parameters_hook_is_refused_in_those_words(strategy: str) -> None:
    for said in run_ranks(refused, num_ranks=2, args=(steps_in_hooks, Plan(strategy=strategy))):
        assert said.startswith("optimizer.step() inside a backward")


class Lookahead(torch.optim.SGD):
    """Keeps slow weights from its making."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()


def looks_ahead(job: Job) -> dict[str, Tensor]:
    model = make_model()
    job.prepare(model, Lookahead(model.parameters()))
    return {}


def test_an_optimizer_with_state_from_its_making_names_it() -> None:
    for said in run_ranks(refused, num_ranks=2, args=(looks_ahead, Plan(strategy="zero2"))):
        assert "keeps slow of parameters from its making" in said
        assert "prepare the inner one" in said


# Parametrizations of a prepared model


def normalised(job: Job) -> dict[str, Tensor]:
    """weight_norm replaces a weight by two parameters, one of them in the weight's memory."""
    model = make_model()
    optimizer = sgd(model)
    job.prepare(model, optimizer)
    weight_norm(model[1].linear)
    if job.plan is None:
        optimizer = sgd(model)
    else:
        assert "was added to the model" in line(lambda: model(batch(0, 0)))
        shardwise.extend(model)
        optimizer.add_param_group({"params": list(model[1].linear.parametrizations.parameters())})
    for step in range(3):
        for rank, weight in job.parts():
            (weight * model(batch(step, rank)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.state(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_weight_that_is_normalised_after_prepare_trains_as_in_one_process(strategy: str) -> None:
    assert_as_one_process(normalised, Plan(strategy=strategy))


def test_a_sharded_weight_that_is_normalised_after_prepare_is_refused() -> None:
    for said in run_ranks(refused, num_ranks=2, args=(normalised, Plan(strategy="fsdp"))):
        assert "is sharded and freed" in said
