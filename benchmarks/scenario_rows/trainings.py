"""One row per way of training: adapters, several models, averages, changes under way, generation and so on."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from quantised import WIDTH as QUANTISED_WIDTH
from quantised import QuantisedNet
from scenario_rows import networks
from scenario_rows.networks import Net, TiedNet, adapt
from scenario_rows.optimizers import Training, inputs, square
from scenario_rows.runners import Runner, Weights
from torch import Tensor, nn

TOKENS = torch.arange(8).view(2, 4)


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def ordinary(runner: Runner, make: Callable[[], nn.Module], **options: Any) -> Weights:
    return Training(runner, make()).train(4, **options)


def language_loss(called: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(called(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def next_tokens(called: Any, step: int, share: int) -> Tensor:
    return language_loss(called, TOKENS + step + share)


def tied(runner: Runner) -> Weights:
    return Training(runner, TiedNet()).train(3, next_tokens)


def partly_frozen() -> Net:
    model = Net()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def lora() -> nn.Module:
    model = Net()
    adapt(model)
    return model


def thawed(runner: Runner) -> Weights:
    """Freeze the first layers for two steps only."""
    model = partly_frozen()
    training = Training(runner, model, adamw(model.parameters()))
    for step in training.steps(4):
        if step == 1:
            model.requires_grad_(True)
    return training.weights()


def quantised(runner: Runner, kind: str) -> Weights:
    def loss(called: Any, step: int, share: int) -> Tensor:
        x = torch.randn(2, 4, QUANTISED_WIDTH, generator=torch.Generator().manual_seed(step))
        found: Tensor = called(x[share]).square().mean()
        return found

    weights = Training(runner, QuantisedNet(kind)).train(3, loss)
    return {name: value for name, value in weights.items() if "base" not in name}


def param_groups(runner: Runner) -> Weights:
    """Use two rates, and a schedule."""
    model = Net()
    groups = [{"params": model.blocks.parameters(), "lr": 0.001}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    model.first.requires_grad_(False)
    training = Training(runner, model, optimizer)
    for _ in training.steps(4):
        schedule.step()
    return training.weights()


def gan(runner: Runner) -> Weights:
    """Step two models with an optimizer each in turn."""
    generator, critic = Net(outputs=networks.WIDTH), Net(outputs=1)
    making, judging = adamw(generator.parameters()), adamw(critic.parameters())
    make, judge = runner.prepare(generator, making), runner.prepare(critic, judging)
    for step in runner.steps(3):

        def told_apart(share: int, step: int = step) -> Tensor:
            found: Tensor = judge(make(inputs(step, share)).detach()).mean() - judge(inputs(step + 50, share)).mean()
            return found

        runner.step(judging, told_apart)
        runner.step(making, lambda share, step=step: -judge(make(inputs(step, share))).mean())
    models = {"generator": generator, "critic": critic}
    return {f"{key}.{name}": value for key, model in models.items() for name, value in runner.weights(model).items()}


def teacher(runner: Runner, *, own_job: bool) -> Weights:
    """Train a student on a frozen teacher, which is prepared as well, or an ordinary module."""
    student, frozen = Net(num_blocks=1), Net().requires_grad_(False)
    training = Training(runner, student)
    knows = runner.prepare(frozen) if own_job else frozen

    def loss(called: Any, step: int, share: int) -> Tensor:
        with torch.no_grad():
            aim = knows(inputs(step, share))
        found: Tensor = (called(inputs(step, share)) - aim).square().mean()
        return found

    return training.train(3, loss)


def preference(runner: Runner) -> Weights:
    """DPO: train a policy against a copy of itself as it was."""
    policy = TiedNet()
    reference = deepcopy(policy).requires_grad_(False)

    def loss(called: Any, step: int, share: int) -> Tensor:
        better, worse = TOKENS + step + share, TOKENS + 2 * step + 3
        with torch.no_grad():
            before = language_loss(reference, worse) - language_loss(reference, better)
        return -nn.functional.logsigmoid(language_loss(called, worse) - language_loss(called, better) - before)

    return Training(runner, policy).train(3, loss)


def shared_encoder(runner: Runner) -> Weights:
    """Train two models with one encoder, in one module and under one optimizer; a step trains one of them."""
    encoder = Net(outputs=networks.WIDTH)
    both = nn.ModuleDict({"one": networks.OnShared(encoder, outputs=3), "other": networks.OnShared(encoder, outputs=2)})
    optimizer = adamw(both.parameters())
    called = runner.prepare_together(both, optimizer)
    for step in runner.steps(4):
        model = called["one" if step % 2 == 0 else "other"]
        runner.step(optimizer, lambda share, step=step, model=model: square(model, step, share))
    return runner.weights(both)


def actor_critic(runner: Runner) -> Weights:
    def loss(called: Any, step: int, share: int) -> Tensor:
        chosen, value = called(inputs(step, share))
        gain = 1 - value
        found: Tensor = (-chosen.log_softmax(-1)[:, :1] * gain.detach() + gain.square()).mean()
        return found

    return Training(runner, networks.ActorCritic()).train(3, loss)


def sentences(runner: Runner) -> Weights:
    """Sentence embeddings: two views of a sample attract each other, the others of its batch repel."""

    def loss(called: Any, step: int, share: int) -> Tensor:
        one, other = (nn.functional.normalize(called(inputs(step + 10 * view, share))) for view in (0, 1))
        return nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(4))

    return Training(runner, Net(outputs=8)).train(3, loss)


def penalty(runner: Runner) -> Weights:
    """Penalise the gradient with respect to the input: backward through a backward."""

    def loss(called: Any, step: int, share: int) -> Tensor:
        x = inputs(step, share).requires_grad_()
        y = called(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        found: Tensor = y.square() + (grad.norm() - 1).square()
        return found

    return Training(runner, Net(outputs=1)).train(2, loss)


def clamped(runner: Runner) -> Weights:
    """Clamp weights after each update."""
    training = Training(runner, Net())
    for _ in training.steps(3):
        with runner.whole(training.model, write=True):
            for parameter in training.model.parameters():
                parameter.clamp_(-0.1, 0.1)
    return training.weights()


def averaged(runner: Runner) -> Weights:
    training = Training(runner, Net())
    average = runner.average(training.model, 0.9)
    for _ in training.steps(3):
        average.update()
    found: Weights = average.weights(runner)
    return found


def streamed(runner: Runner) -> Weights:
    """Read all weights one after the other between two steps, as an inference engine takes them."""
    training = Training(runner, Net())
    taken: Weights = {}
    for step in training.steps(2):
        taken |= {f"{step}.{name}": value.detach().clone() for name, value in runner.stream(training.model)}
    return taken


def late(runner: Runner, change: Callable[[Net], list[nn.Parameter]]) -> Weights:
    """Change the model after two steps, and train on."""
    model = Net()
    training = Training(runner, model)
    for step in training.steps(4):
        if step == 1:
            torch.manual_seed(9)
            new = change(model)
            runner.extend(model)
            training.optimizer.add_param_group({"params": new})
    return training.weights()


def new_head(model: Net) -> list[nn.Parameter]:
    model.head = nn.Linear(networks.WIDTH, 2)
    return list(model.head.parameters())


def other_method(runner: Runner) -> Weights:
    training = Training(runner, Net())
    runner.forward_method(training.model, "training_step")
    return training.train(3, lambda called, step, share: called.training_step(inputs(step, share)))


def two_optimizers(runner: Runner) -> Weights:
    model = Net()
    made = torch.optim.SGD(model.blocks.parameters(), lr=0.1), adamw(model.head.parameters())
    model.first.requires_grad_(False)
    return Training(runner, model, *made).train(3)


def later_group(runner: Runner) -> Weights:
    """Add the first layers to the optimizer after two steps."""
    model = Net()
    model.first.requires_grad_(False)
    training = Training(runner, model)
    for step in training.steps(4):
        if step == 1:
            model.first.requires_grad_(True)
            training.optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.001})
    return training.weights()


def generates(runner: Runner) -> Weights:
    """Generate text of another length on each rank, between steps."""
    model = TiedNet()
    training = Training(runner, model)
    found: Weights = {}
    for step in training.steps(2, next_tokens):
        with runner.evaluating(model):
            text = model.continued(TOKENS, length=3 + runner.rank)
        found[f"text {step}"] = text[:, :7].clone()
    return {**found, **training.weights()}


def uneven_evaluation(runner: Runner) -> Weights:
    """Evaluate more on one rank than on the other."""
    training = Training(runner, Net())
    for _ in training.steps(2):
        with runner.evaluating(training.model), torch.no_grad():
            for number in range(1 + 2 * runner.rank):
                training.called(inputs(number, 0))
    return training.weights()


def in_bf16(runner: Runner) -> Weights:
    plan = {} if runner.name in ("one process", "torch DDP", "fully_shard") else {"precision": "native"}

    def loss(called: Any, step: int, share: int) -> Tensor:
        found: Tensor = called(inputs(step, share).bfloat16()).float().square().mean()
        return found

    return Training(runner, Net().bfloat16(), **plan).train(3, loss)


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
