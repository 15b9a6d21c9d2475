"""What cannot be had together with a plan inside another framework is refused in one line."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import preload, run_ranks
from torch import nn
from training import line

import shardwise
from shardwise import Plan, Task
from shardwise.base.errors import InvalidModel
from shardwise.base.vocabulary import tested_versions
from shardwise.doors.integrations.asked_plan import asked_plan

preload("transformers.models.llama.modeling_llama", "transformers.trainer", "lightning.pytorch")


def needs(package: str) -> None:
    """Skip where it is not installed. It is not imported here: some set environment variables."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))


def trainers(rank: int, folder: str) -> None:
    from transformers import TrainingArguments

    from shardwise.integrations import ShardwiseTrainer

    def make(plan: Any = "fsdp", model: Any = None, **settings: Any) -> Any:
        args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], **settings)
        return ShardwiseTrainer(model=model or make_llama(), args=args, plan=plan)

    for settings, way_out in (
        ({"ddp_bucket_cap_mb": 10}, "TrainingArguments(ddp_bucket_cap_mb=10) with Shardwise: set plan.bucket_bytes"),
        ({"ddp_find_unused_parameters": True}, "unused parameters are found"),
        ({"torch_compile": True}, "set plan.compile = 'inductor'"),
        ({"auto_find_batch_size": True}, "shardwise plan"),
        ({"bf16_full_eval": True}, "plan.precision = 'bf16'"),
        ({"plan": Plan(strategy="ddp"), "bf16": True}, "say 'bf16' in the plan as well"),
        ({"plan": Plan(precision="fp16")}, "use 'bf16'"),
        ({"plan": Plan(micro_batch=4), "per_device_train_batch_size": 2}, "they must be the same"),
        ({"plan": Plan(accumulate=3), "gradient_accumulation_steps": 2}, "its own setting, which is 2"),
        ({"plan": Plan(engine="torch")}, "engine = 'shardwise'"),
        ({"plan": "fdsp"}, "strategy = 'fdsp'"),
        ({"plan": 3}, "must be a shardwise.Plan"),
    ):
        assert way_out in line(lambda settings=settings: make(**settings)), settings
    # fsdp= and deepspeed= are looked at before the Trainer is.
    from shardwise.doors.integrations.trainer_arguments import checked_plan

    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    for name, value in (("fsdp", True), ("deepspeed", {"zero_optimization": {"stage": 2}}), ("fp16", True)):
        before = getattr(args, name)
        setattr(args, name, value)
        assert f"TrainingArguments({name}=" in line(lambda: checked_plan(args, plan="fsdp"))
        setattr(args, name, before)
    prepared, _ = shardwise.prepare(make_llama(), None, Plan())
    assert "has been through shardwise.prepare already" in line(lambda: make(model=prepared))


@pytest.mark.timeout(120)
def test_mixin_after_its_trainer_is_one_line() -> None:
    needs("transformers")
    from transformers import Trainer

    from shardwise.integrations import ShardwiseMixin

    type("Right", (type("Own", (ShardwiseMixin, Trainer), {}),), {})
    with pytest.raises(InvalidModel, match=r"^class Wrong\(Trainer, ShardwiseMixin\): the mixin comes first: "):
        type("Wrong", (Trainer, ShardwiseMixin), {})


@pytest.mark.timeout(180)
def test_a_trainer_refuses_other_engines_and_settings_that_contradict_the_plan(tmp_path: Path) -> None:
    needs("transformers")
    needs("accelerate")
    run_ranks(trainers, num_ranks=1, args=(str(tmp_path),), timeout_seconds=150.0)


def loaded_sharded(rank: int, folder: str) -> list[str]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import LlamaForCausalLM, TrainingArguments
    from transformers.distributed import DistributedConfig

    from shardwise.integrations import ShardwiseAccelerator, ShardwiseTrainer

    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    lines = []
    try:
        for given in ({"fsdp_size": 2}, {"tp_size": 2, "tp_plan": "auto"}):
            model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**given))
            for take in (
                lambda model=model: shardwise.prepare(model, None, Plan()),
                lambda model=model: ShardwiseTrainer(model=model, args=args, plan="fsdp"),
                lambda model=model: ShardwiseAccelerator(cpu=True, plan="fsdp").prepare(model),
            ):
                lines.append(line(take))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return lines


@pytest.mark.timeout(180)
def test_a_model_that_transformers_has_distributed_is_refused_by_what_its_user_wrote(tmp_path: Path) -> None:
    needs("transformers")
    needs("accelerate")
    make_llama().save_pretrained(tmp_path)
    for lines in run_ranks(loaded_sharded, num_ranks=2, args=(str(tmp_path),), timeout_seconds=150.0):
        assert ["(fsdp_size = 2)" in one for one in lines] == [True] * 3 + [False] * 3
        assert ["(tp_size = 2)" in one for one in lines] == [False] * 3 + [True] * 3
        assert all("call from_pretrained without distributed_config and tp_plan" in one for one in lines)


def callbacks_inside_steps(rank: int, folder: str) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from shardwise.integrations import ShardwiseTrainer

    class Inside(TrainerCallback):
        """It sees the gradients of every step, before the update."""

        norms: list[Any]

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            parameters = [p for group in options["optimizer"].param_groups for p in group["params"]]
            self.norms.append(sum(float(p.grad.norm()) for p in parameters if p.grad is not None))

    def make(callbacks: Any = ()) -> Any:
        torch.manual_seed(0)
        data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to=[],
            max_steps=3,
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-2,
        )
        return ShardwiseTrainer(
            model=make_llama(), args=args, plan="fsdp", train_dataset=data, eval_dataset=data, callbacks=[*callbacks]
        )

    inside = Inside()
    inside.norms = []
    plain, watched = make(), make(callbacks=[inside])
    for trainer in (plain, watched):
        trainer.train()
    assert len(inside.norms) == 3
    assert all(norm > 0 for norm in inside.norms)
    expected = watched.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in plain.model.state_dict().items())
    # Evaluation before any training, and training twice, with the same model.
    trainer = make()
    losses = [trainer.evaluate()["eval_loss"]]
    for _ in range(2):
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.timeout(180)
def test_callbacks_inside_of_a_step_find_its_gradients_and_change_nothing(tmp_path: Path) -> None:
    needs("transformers")
    needs("accelerate")
    run_ranks(callbacks_inside_steps, num_ranks=1, args=(str(tmp_path),), timeout_seconds=150.0)


def accelerators(rank: int) -> None:
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType

    from shardwise.integrations import ShardwiseAccelerator

    handlers = [DistributedDataParallelKwargs()]
    refused = line(lambda: ShardwiseAccelerator(cpu=True, plan="ddp", kwargs_handlers=handlers))
    assert "DistributedDataParallelKwargs" in refused
    accelerator = ShardwiseAccelerator(cpu=True, plan="fsdp")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepared, _ = shardwise.prepare(nn.Linear(4, 4), None, Plan())
    assert "hand over the model as it was made" in line(lambda: accelerator.prepare(prepared))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    some = list(model.parameters())[:1]
    expected = shardwise.grad_norms(model)["0.weight"]
    assert accelerator.clip_grad_norm_(some, 1e-3).item() == pytest.approx(expected)
    assert shardwise.grad_norms(model)["0.weight"] == pytest.approx(1e-3, rel=1e-2)
    mixed = [*some, nn.Parameter(torch.ones(2))]
    assert "clip each model by itself" in line(lambda: accelerator.clip_grad_norm_(mixed, 1.0))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0
    # Twice the same objects, as the Trainer does it.
    assert accelerator.prepare(model, optimizer)[0] is model
    # What has no parameters is left alone, and so is another model's norm.
    assert accelerator.prepare(nn.ReLU()) is not None
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert accelerator.clip_grad_norm_(other.parameters(), 1.0) > 0
    # A plan is chosen where a loss and batches are known.
    automatic = ShardwiseAccelerator(cpu=True, plan="auto")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "then accelerator.run_plan(shardwise.Plan.auto(task))" in line(lambda: automatic.prepare(net))
    task = Task(model=net, loss=lambda model, batch: model(batch).sum(), make_batch=lambda size: torch.ones(size, 4))
    automatic.run_plan(Plan.auto(task, plan=Plan(micro_batch=2, precision="fp32")))
    assert not automatic.plan.is_auto
    automatic.prepare(net)(torch.ones(2, 4)).sum().backward()
    accelerator.state.distributed_type = DistributedType.FSDP
    assert "leave that out and set plan.strategy" in line(lambda: accelerator.run_plan("fsdp"))


@pytest.mark.timeout(120)
def test_an_accelerator_refuses_other_engines_and_prepared_models_and_clips_what_is_named() -> None:
    needs("accelerate")
    run_ranks(accelerators, num_ranks=1, timeout_seconds=100.0)


def optimizers_of_accelerate(rank: int) -> None:
    from accelerate.state import AcceleratorState, GradientState

    from shardwise.integrations import ShardwiseAccelerator

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def accelerated(plan: Any = "fsdp") -> Any:
        return ShardwiseAccelerator(cpu=True, plan=plan, gradient_accumulation_steps=2)

    def train(accelerator: Any, model: Any, optimizer: Any) -> Any:
        for step in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((2, 4), 1.0 + step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    try:
        accelerator = accelerated()
        expected = train(accelerator, *accelerator.prepare(*make()))
        # Prepared by itself, after its model or before it: it is the same training.
        for first in ("model", "optimizer"):
            accelerator, (model, optimizer) = accelerated(), make()
            made = {"model": model, "optimizer": optimizer}
            for name in sorted(made, key=lambda name: name != first):
                made[name] = accelerator.prepare(made[name])
            found = train(accelerator, made["model"], made["optimizer"])
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
        # An optimizer of another model: the line of shardwise.prepare, at once, or at its first step.
        (model, _), (_, other) = make(), make()
        refused = line(lambda: shardwise.prepare(model, other, Plan(strategy="fsdp")))
        assert "holds a parameter of shape (4, 4) that is not the model's" in refused
        assert line(lambda: accelerated().prepare(model, other)) == refused
        accelerator, (model, _) = accelerated(), make()
        model, other = accelerator.prepare(model), accelerator.prepare(other)
        assert line(lambda: train(accelerator, model, other)) == refused
        # A model that is not prepared.
        accelerator, (model, optimizer) = accelerated(), make()
        optimizer = accelerator.prepare(optimizer)
        assert "SGD steps a model that has not been prepared" in line(lambda: train(accelerator, model, optimizer))
        # An optimizer that is not prepared does not know of the accumulation.
        for plan in ("fsdp", Plan(strategy="zero2", accumulate_reduced=True)):
            accelerator, (model, optimizer) = accelerated(plan), make()
            model = accelerator.prepare(model)
            assert line(lambda made=(accelerator, model, optimizer): train(*made)) == (
                "SGD steps in the middle of an accumulation: it has not been prepared, and so does not wait for the last "
                "pass; optimizer = accelerator.prepare(optimizer)"
            )
            # The block is over, and an optimizer that is stepped after the last pass need not know.
            optimizer.zero_grad()
            for _ in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 4)).square().mean())
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.ledger("accelerate-optimizer", outcome="refused")
@pytest.mark.timeout(120)
def test_an_optimizer_that_accelerate_was_not_given_with_its_model_is_named() -> None:
    needs("accelerate")
    run_ranks(optimizers_of_accelerate, num_ranks=2, timeout_seconds=100.0)


def strategies(rank: int) -> None:
    from lightning.pytorch.plugins import HalfPrecision, MixedPrecision

    from shardwise.integrations import ShardwiseFabricStrategy, ShardwiseStrategy

    for kind in (ShardwiseStrategy, ShardwiseFabricStrategy):
        refused = line(lambda kind=kind: kind(plan="fsdp", find_unused_parameters=True))
        assert f"{kind.__name__} has no option find_unused_parameters" in refused

    class Asked:
        accumulate_grad_batches = 1

    strategy = ShardwiseStrategy(plan="zero2")
    assert strategy._plan(Asked()) == Plan(strategy="zero2")
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    assert strategy._plan(Asked()) == Plan(strategy="zero2", precision="bf16")
    strategy.precision_plugin = HalfPrecision("16-true")
    assert "use bf16" in line(lambda: strategy._plan(Asked()))
    fabric = ShardwiseFabricStrategy(plan="auto")
    assert "then ShardwiseFabricStrategy(plan=shardwise.Plan.auto(task," in line(
        lambda: fabric.setup_module(nn.Linear(4, 4))
    )
    strategy = ShardwiseStrategy(plan=Plan(accumulate=4))
    assert "its own setting, which is 1" in line(lambda: strategy._plan(Asked()))


@pytest.mark.timeout(120)
def test_lightnings_strategies_refuse_options_of_ddp_and_precisions_that_contradict_the_plan() -> None:
    needs("lightning")
    run_ranks(strategies, num_ranks=1, timeout_seconds=100.0)


def test_a_version_that_was_not_tested_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(found: str) -> list[str]:
        monkeypatch.setattr(tested_versions, "version", lambda library: found)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tested_versions.warn_if_untested("accelerate")
        return [str(warning.message) for warning in caught]

    for tested in ("1.15", "1.15.0", "1.15.3rc1"):
        assert told(tested) == []
    for other in ("1.14.2", "1.16.0", "2.0", "1.16.0.dev0"):
        (said,) = told(other)
        assert said.startswith(f"accelerate {other}: ")
        assert len(said.splitlines()) == 1


def test_the_precision_of_a_strategys_name_is_the_frameworks() -> None:
    for said in ("bf16", "bf16-mixed"):
        assert asked_plan("zero2", said=said, setting="") == Plan(strategy="zero2", precision="bf16")
    assert "use bf16" in line(lambda: asked_plan("zero2", said="fp16", setting="mixed_precision='fp16'"))


def test_integrations_import_no_framework_before_it_is_used_and_name_the_extra_that_brings_it() -> None:
    code = """
import sys
import shardwise.integrations
assert not {"transformers", "accelerate", "lightning"} & set(sys.modules)
for package, name in (("accelerate", "ShardwiseAccelerator"), ("lightning", "ShardwiseStrategy")):
    sys.modules[package] = None
    try:
        getattr(shardwise.integrations, name)
    except shardwise.ShardwiseError as error:
        print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    first, second = ended.stdout.splitlines()
    assert first == "shardwise.integrations.ShardwiseAccelerator needs accelerate: pip install 'shardwise[accelerate]'"
    assert second == "shardwise.integrations.ShardwiseStrategy needs lightning: pip install 'shardwise[lightning]'"
