"""One row per way of training: adapters, several models, averages, changes under way, generation and so on."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from quantised import WIDTH as QUANTISED_WIDTH
from quantised import QuantisedNet
from scenario_rows import networks
from scenario_rows.networks import Net, TiedNet, adapt
from scenario_rows.optimizers import Both, inputs
from scenario_rows.runners import Runner
from torch import Tensor, nn

Weights = dict[str, Tensor]
TOKENS = torch.arange(8).view(2, 4)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def square(called: Any, step: int, share: int) -> Tensor:
    loss: Tensor = called(inputs(step, share)).square().mean()
    return loss


def ordinary(runner: Runner, make: Callable[[], nn.Module], *, plan: Any = (), **options: Any) -> Weights:
    """Four steps of one model; `options` are those of a step."""
    model = make()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    called = runner.prepare(model, optimizer, **dict(plan))
    for step in range(4):
        runner.step(optimizer, lambda share, step=step: square(called, step, share), **options)
    return runner.weights(model)


def language_loss(called: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(called(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tied(runner: Runner) -> Weights:
    model = TiedNet()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    for step in range(3):
        runner.step(optimizer, lambda share, step=step: language_loss(called, TOKENS + step + share))
    return runner.weights(model)


def partly_frozen() -> nn.Module:
    model = Net()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def lora() -> nn.Module:
    model = Net()
    adapt(model)
    return model


def thawed(runner: Runner) -> Weights:
    """The first layers are frozen for two steps, and then are not."""
    model = partly_frozen()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
    return runner.weights(model)


def quantised(runner: Runner, kind: str) -> Weights:
    model = QuantisedNet(kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(trained)
    called = runner.prepare(model, optimizer)
    for step in range(3):
        x = torch.randn(2, 4, QUANTISED_WIDTH, generator=torch.Generator().manual_seed(step))
        runner.step(optimizer, lambda share, x=x: called(x[share]).square().mean())
    return {name: value for name, value in runner.weights(model).items() if "base" not in name}


def param_groups(runner: Runner) -> Weights:
    """Two rates, and a schedule."""
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": model.blocks.parameters(), "lr": 0.001}, {"params": model.head.parameters()}], lr=0.02
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    model.first.requires_grad_(False)
    called = runner.prepare(model, optimizer)
    for step in range(4):
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
        schedule.step()
    return runner.weights(model)


def gan(runner: Runner) -> Weights:
    """Two models with an optimizer each, stepped in turn."""
    generator, critic = Net(outputs=networks.WIDTH), Net(outputs=1)
    making, judging = adamw(generator.parameters()), adamw(critic.parameters())
    make, judge = runner.prepare(generator, making), runner.prepare(critic, judging)
    for step in range(3):

        def told_apart(share: int, step: int = step) -> Tensor:
            found: Tensor = judge(make(inputs(step, share)).detach()).mean() - judge(inputs(step + 50, share)).mean()
            return found

        runner.step(judging, told_apart)
        runner.step(making, lambda share, step=step: -judge(make(inputs(step, share))).mean())
    return _named(runner, generator=generator, critic=critic)


def _named(runner: Runner, **models: nn.Module) -> Weights:
    return {f"{key}.{name}": value for key, model in models.items() for name, value in runner.weights(model).items()}


def teacher(runner: Runner, *, own_job: bool) -> Weights:
    """A student learns from a teacher, which is frozen: prepared as well, or an ordinary module."""
    student, frozen = Net(num_blocks=1), Net().requires_grad_(False)
    optimizer = adamw(student.parameters())
    called = runner.prepare(student, optimizer)
    knows = runner.prepare(frozen) if own_job else frozen

    def loss(share: int, step: int) -> Tensor:
        with torch.no_grad():
            aim = knows(inputs(step, share))
        return (called(inputs(step, share)) - aim).square().mean()

    for step in range(3):
        runner.step(optimizer, lambda share, step=step: loss(share, step))
    return runner.weights(student)


def preference(runner: Runner) -> Weights:
    """DPO: a policy against a copy of itself as it was."""
    policy = TiedNet()
    reference = deepcopy(policy).requires_grad_(False)
    optimizer = adamw(policy.parameters())
    called = runner.prepare(policy, optimizer)

    def loss(share: int, step: int) -> Tensor:
        better, worse = TOKENS + step + share, TOKENS + 2 * step + 3
        with torch.no_grad():
            before = language_loss(reference, worse) - language_loss(reference, better)
        return -nn.functional.logsigmoid(language_loss(called, worse) - language_loss(called, better) - before)

    for step in range(3):
        runner.step(optimizer, lambda share, step=step: loss(share, step))
    return runner.weights(policy)


def shared_encoder(runner: Runner) -> Weights:
    """Two models with one encoder, in one module and under one optimizer; a step trains one of them."""
    encoder = Net(outputs=networks.WIDTH)
    both = nn.ModuleDict({"one": networks.OnShared(encoder, outputs=3), "other": networks.OnShared(encoder, outputs=2)})
    optimizer = adamw(both.parameters())
    called = runner.prepare_together(both, optimizer)
    for step in range(4):
        model = called["one" if step % 2 == 0 else "other"]
        runner.step(optimizer, lambda share, step=step, model=model: square(model, step, share))
    return runner.weights(both)


def actor_critic(runner: Runner) -> Weights:
    model = networks.ActorCritic()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)

    def loss(share: int, step: int) -> Tensor:
        chosen, value = called(inputs(step, share))
        gain = 1 - value
        return (-chosen.log_softmax(-1)[:, :1] * gain.detach() + gain.square()).mean()

    for step in range(3):
        runner.step(optimizer, lambda share, step=step: loss(share, step))
    return runner.weights(model)


def sentences(runner: Runner) -> Weights:
    """Sentence embeddings: two views of a sample attract each other, the others of its batch repel."""
    model = Net(outputs=8)
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)

    def loss(share: int, step: int) -> Tensor:
        one, other = (nn.functional.normalize(called(inputs(step + 10 * view, share))) for view in (0, 1))
        return nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(4))

    for step in range(3):
        runner.step(optimizer, lambda share, step=step: loss(share, step))
    return runner.weights(model)


def penalty(runner: Runner) -> Weights:
    """A penalty on the gradient with respect to the input: backward through a backward."""
    model = Net(outputs=1)
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)

    def loss(share: int, step: int) -> Tensor:
        x = inputs(step, share).requires_grad_()
        y = called(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return y.square() + (grad.norm() - 1).square()

    for step in range(2):
        runner.step(optimizer, lambda share, step=step: loss(share, step))
    return runner.weights(model)


def clamped(runner: Runner) -> Weights:
    """Weights are clamped after each update."""
    model = Net()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    for step in range(3):
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
        with runner.whole(model, write=True):
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
    return runner.weights(model)


def averaged(runner: Runner) -> Weights:
    model = Net()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    average = runner.average(model, 0.9)
    for step in range(3):
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
        average.update()
    return average.weights(runner)


def streamed(runner: Runner) -> Weights:
    """All weights, one after the other, between two steps, as an inference engine takes them."""
    model = Net()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    taken: Weights = {}
    for step in range(2):
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
        taken |= {f"{step}.{name}": value.detach().clone() for name, value in runner.stream(model)}
    return taken


def late(runner: Runner, change: Callable[[Net], list[nn.Parameter]]) -> Weights:
    """After two steps the model is changed, and trained on."""
    model = Net()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    for step in range(4):
        if step == 2:
            torch.manual_seed(9)
            new = change(model)
            runner.extend(model)
            optimizer.add_param_group({"params": new})
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
    return runner.weights(model)


def new_head(model: Net) -> list[nn.Parameter]:
    model.head = nn.Linear(networks.WIDTH, 2)
    return list(model.head.parameters())


def other_method(runner: Runner) -> Weights:
    model = Net()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    runner.forward_method(model, "training_step")
    for step in range(3):
        runner.step(optimizer, lambda share, step=step: called.training_step(inputs(step, share)))
    return runner.weights(model)


def two_optimizers(runner: Runner) -> Weights:
    model = Net()
    one, other = torch.optim.SGD(model.blocks.parameters(), lr=0.1), adamw(model.head.parameters())
    model.first.requires_grad_(False)
    called = runner.prepare(model, one, other)
    for step in range(3):
        runner.step(Both(one, other), lambda share, step=step: square(called, step, share))  # type: ignore[arg-type]
    return runner.weights(model)


def later_group(runner: Runner) -> Weights:
    """The first layers join the optimizer after two steps."""
    model = Net()
    model.first.requires_grad_(False)
    optimizer = adamw([*model.blocks.parameters(), *model.head.parameters()])
    called = runner.prepare(model, optimizer)
    for step in range(4):
        if step == 2:
            model.first.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.001})
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
    return runner.weights(model)


def generates(runner: Runner) -> Weights:
    """Text of another length on each rank, between steps."""
    model = TiedNet()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    found: Weights = {}
    for step in range(2):
        runner.step(optimizer, lambda share, step=step: language_loss(called, TOKENS + step + share))
        with runner.evaluating(model):
            text = model.continued(TOKENS, length=3 + runner.rank)
        found[f"text {step}"] = text[:, :7].clone()
    return {**found, **runner.weights(model)}


def uneven_evaluation(runner: Runner) -> Weights:
    """One rank has more to evaluate than the other."""
    model = Net()
    optimizer = adamw(model.parameters())
    called = runner.prepare(model, optimizer)
    for step in range(2):
        runner.step(optimizer, lambda share, step=step: square(called, step, share))
        with runner.evaluating(model), torch.no_grad():
            for number in range(1 + 2 * runner.rank):
                called(inputs(number, 0))
    return runner.weights(model)


def half() -> nn.Module:
    return Net().bfloat16()


def in_bf16(runner: Runner) -> Weights:
    model = half()
    optimizer = adamw(model.parameters())
    options = {} if runner.name in ("one process", "torch DDP", "fully_shard") else {"precision": "native"}
    called = runner.prepare(model, optimizer, **options)
    for step in range(3):
        runner.step(optimizer, lambda share, step=step: called(inputs(step, share).bfloat16()).float().square().mean())
    return runner.weights(model)


ROWS: dict[str, Callable[[Runner], Weights]] = {
    "a plain stack of blocks": partial(ordinary, make=Net),
    "four passes per step": partial(ordinary, make=Net, passes=4),
    "clipping by the norm": partial(ordinary, make=Net, clip=0.1),
    "clipping by value": partial(ordinary, make=Net, clip_value=0.001),
    "two rates and a schedule": param_groups,
    "tied embedding and head": tied,
    "frozen layers": partial(ordinary, make=partly_frozen),
    "layers thawed under way": thawed,
    "LoRA": partial(ordinary, make=lora),
    "QLoRA, a tensor subclass as torchao's": partial(quantised, kind="subclass"),
    "QLoRA, int8 weights as bitsandbytes'": partial(quantised, kind="int8"),
    "a model in bf16": in_bf16,
    "GAN: two models in turn": gan,
    "teacher and student, both prepared": partial(teacher, own_job=True),
    "teacher and student, an ordinary teacher": partial(teacher, own_job=False),
    "DPO with a frozen reference": preference,
    "two models with one encoder": shared_encoder,
    "actor and critic": actor_critic,
    "mixture of experts, some unused": partial(ordinary, make=networks.Experts),
    "LSTM": partial(ordinary, make=networks.Recurrent),
    "UNet": partial(ordinary, make=networks.UNet),
    "diffusion transformer": partial(ordinary, make=networks.DiffusionTransformer),
    "complex parameters": partial(ordinary, make=networks.Spectral),
    "sentence embeddings": sentences,
    "gradient penalty (double backward)": penalty,
    "torch's own checkpointing in the model": partial(ordinary, make=partial(Net, checkpointed=True)),
    "weights clamped after each update": clamped,
    "a moving average of the weights": averaged,
    "weights streamed out between steps": streamed,
    "adapters added after prepare": partial(late, change=adapt),
    "a head replaced after prepare": partial(late, change=new_head),
    "training through another method": other_method,
    "two optimizers for one model": two_optimizers,
    "a param group added later": later_group,
    "generation of uneven length between steps": generates,
    "uneven evaluation between steps": uneven_evaluation,
}
