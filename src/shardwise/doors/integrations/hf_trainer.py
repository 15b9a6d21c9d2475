"""Hugging Face Transformers' `Trainer` with our engine, and a mixin for trainers derived from it.

    trainer = ShardwiseTrainer(model=model, args=args, train_dataset=data, plan=Plan(strategy="fsdp"))

    class MyTrainer(ShardwiseMixin, SFTTrainer): ...

The Trainer prepares, accumulates and clips through its accelerator, which becomes ours (hf_accelerator.py). This file
does the rest: all ranks gather a state before one of them writes it.
"""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_NAME, Trainer

from shardwise.base.errors import InvalidModel
from shardwise.base.vocabulary.tested_versions import warn_if_untested
from shardwise.doors.integrations.hf_accelerator import ShardwiseAccelerator
from shardwise.doors.integrations.loss_parameters import hold_loss_parameters, without_loss_parameters
from shardwise.doors.integrations.trainer_arguments import checked_plan
from shardwise.doors.integrations.trainer_auto import solved_plan
from shardwise.doors.integrations.trainer_recovery import TrainerRecovery
from shardwise.engine.guards.refuse import refuse_loaded_sharded
from shardwise.engines import find_engine, whole
from shardwise.plan import Plan

_CHOOSE = "trainer.train() chooses it from the first batch; to evaluate or predict before that, name a strategy"


class ShardwiseMixin:
    """A mixin in front of a Trainer class, whose models run `plan`: a Plan, a strategy (default: ddp), or "auto".

    With `memory`, train() keeps snapshots in /dev/shm, and continues from them when the ranks are started again: every
    so many steps, or True: as often as costs 1% of the time.
    """

    # Attributes of the Trainer, for the type checker.
    accelerator: Any
    args: Any
    callback_handler: Any
    model: Any
    optimizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        before = [one for one in cls.__mro__ if not issubclass(one, ShardwiseMixin)]
        first = next((one for one in before if hasattr(one, "training_step")), None)
        if first is not None and cls.__mro__.index(first) < cls.__mro__.index(ShardwiseMixin):
            raise InvalidModel(
                f"class {cls.__name__}({first.__name__}, ShardwiseMixin): the mixin comes first: "
                f"class {cls.__name__}(ShardwiseMixin, {first.__name__})"
            )

    def __init__(self, *arguments: Any, plan: Plan | str = "ddp", memory: bool | int = False, **options: Any) -> None:
        warn_if_untested("transformers")
        self._asked_plan = plan
        self._asked_memory = memory
        self._recovery: TrainerRecovery | None = None
        # All weights of the model, while one rank writes them.
        self._gathered: dict[str, Tensor] | None = None
        super().__init__(*arguments, **options)
        # sentence-transformers' trainers have losses that are modules.
        hold_loss_parameters(self.model, getattr(self, "loss", None))

    @property
    def plan(self) -> Plan:
        plan: Plan = self.accelerator.plan
        return plan

    def create_accelerator_and_postprocess(self) -> None:
        if self.model is not None and find_engine(self.model) is not None:
            raise InvalidModel(
                "this model has been through shardwise.prepare already: hand the Trainer the model as it was made, "
                "with plan="
            )
        if self.model is not None:
            # The Trainer would ask for save_only_model first.
            refuse_loaded_sharded(self.model)
        plan = checked_plan(self.args, plan=self._asked_plan)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        ShardwiseAccelerator.adopt(self.accelerator, plan=plan, choose=_CHOOSE)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Solve `plan="auto"`, look for a snapshot in memory, then call the Trainer's own method. Collective."""
        if self.plan.is_auto:
            self.accelerator.run_plan(solved_plan(self, plan=self.plan))
        for callback in self.callback_handler.callbacks:
            # TRL's, which moves a reference model towards the trained one, parameter by parameter.
            if hasattr(type(callback), "sync_target_model"):
                callback.sync_target_model = partial(_sync_unsharded, type(callback).sync_target_model)
        if not self._asked_memory:
            return super().train(resume_from_checkpoint, *arguments, **options)  # type: ignore[misc]
        every = None if self._asked_memory is True else self._asked_memory
        output_dir: str = self.args.output_dir
        ended = False
        self._recovery = TrainerRecovery(output_dir, device=self.accelerator.device, every=every)
        try:
            found = self._recovery.find(output_dir, asked=resume_from_checkpoint)
            result = super().train(found, *arguments, **options)  # type: ignore[misc]
            ended = True
            return result
        finally:
            self._recovery.close(free=ended)
            self._recovery = None

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*arguments, **options)  # type: ignore[misc]
        if self._recovery is not None:
            scheduler, state = self.lr_scheduler, self.state  # type: ignore[attr-defined]
            self._recovery.completed(self.model, self.optimizer.optimizer, scheduler, state)

    def _load_from_checkpoint(self, folder: str, *arguments: Any, **options: Any) -> None:
        if self._recovery is None or not self._recovery.is_ours(folder):
            super()._load_from_checkpoint(folder, *arguments, **options)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._recovery is not None and self._recovery.is_ours(checkpoint):
            self._recovery.load(self.model, self.optimizer.optimizer, self.lr_scheduler)  # type: ignore[attr-defined]
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._recovery is not None and self._recovery.is_ours(checkpoint):
            self._recovery.restore_random_states()
        else:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Do nothing: `prepare` moves each rank's slices, so that the whole model need not fit on a device."""

    # Gradients

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.accelerator.clip_grad_norm_(without_loss_parameters(model), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        return self.accelerator.clip_grad_norm_(without_loss_parameters(model), float("inf"))

    # States

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather the weights on all ranks, then call the Trainer's own method, which writes on one. Collective."""
        self._gathered = self.model.state_dict() if find_engine(self.model) is not None else None
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        state = self._gathered if state_dict is None else state_dict
        dtypes = [value.dtype for value in (self._gathered or {}).values() if value.is_floating_point()]
        super()._save(output_dir, state_dict=state)  # type: ignore[misc]
        folder = output_dir or self.args.output_dir
        config: Any = getattr(self.model, "config", None)
        # Adapters are saved without the model's config.
        if dtypes and hasattr(config, "save_pretrained") and os.path.exists(os.path.join(folder, CONFIG_NAME)):
            # The file holds the optimizer's weights; the model's parameters have the dtype that the plan computes in.
            config.dtype = str(dtypes[0]).removeprefix("torch.")
            config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Gather the optimizer's state on all ranks; the Trainer asks only one rank for it. Collective."""
        optimizer, state = self.optimizer, self.optimizer.state_dict()
        os.makedirs(output_dir, exist_ok=True)
        self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer


def _sync_unsharded(sync: Callable[..., None], model: nn.Module, target: nn.Module, alpha: float) -> None:
    """Run TRL's update of `target` on unsharded parameters of both models. Collective."""
    with whole(model), whole(target, write=True):
        sync(model, target, alpha)


class ShardwiseTrainer(ShardwiseMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer with `plan=`."""
