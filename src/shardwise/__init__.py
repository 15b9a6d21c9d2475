"""Shardwise: train with any strategy from DDP to FSDP; predict its cost, run it, verify the prediction.

The imports below are the list of public names. A name is imported at its first use, so that `import shardwise` and the
command line do not pay for torch (two seconds) before they need it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.base.vocabulary.auto_solver import register_solver
from shardwise.base.vocabulary.lazy_names import lazy_names
from shardwise.base.vocabulary.version import __version__ as __version__

if TYPE_CHECKING:
    from shardwise.base.errors import ShardwiseError as ShardwiseError
    from shardwise.doors.integrations.lean_causal_loss import lean_loss as lean_loss
    from shardwise.engine.engine import tape as tape
    from shardwise.engine.optimizer.scaler import GradScaler as GradScaler
    from shardwise.engine.plan_change.extend import extend as extend
    from shardwise.engine.prepared.average import EMA as EMA
    from shardwise.engine.prepared.evaluating import evaluating as evaluating
    from shardwise.engine.prepared.forward_method import forward_method as forward_method
    from shardwise.engine.prepared.summary import summary as summary
    from shardwise.engines import accumulate as accumulate
    from shardwise.engines import clip_grad_norm_ as clip_grad_norm_
    from shardwise.engines import clip_grad_value_ as clip_grad_value_
    from shardwise.engines import edit as edit
    from shardwise.engines import full_state_dict as full_state_dict
    from shardwise.engines import grad_norms as grad_norms
    from shardwise.engines import join as join
    from shardwise.engines import load_full_state_dict as load_full_state_dict
    from shardwise.engines import mean_count as mean_count
    from shardwise.engines import prepare as prepare
    from shardwise.engines import replan as replan
    from shardwise.engines import weight_stream as weight_stream
    from shardwise.engines import whole as whole
    from shardwise.measure.report.predictions import predict as predict
    from shardwise.models.tasks import Task as Task
    from shardwise.models.tasks.load_task import load_task as load_task
    from shardwise.models.weights.pretrained import from_pretrained as from_pretrained
    from shardwise.models.weights.pretrained import save_pretrained as save_pretrained
    from shardwise.plan import Plan as Plan
    from shardwise.plan.placement import STRATEGIES as STRATEGIES
    from shardwise.plan.placement import Mesh as Mesh
    from shardwise.plan.placement import Placement as Placement
    from shardwise.program.spec import ModelSpec as ModelSpec
    from shardwise.program.spec import TensorSpec as TensorSpec
    from shardwise.program.spec import UnitSpec as UnitSpec
    from shardwise.program.units import model_spec as model_spec
    from shardwise.state.recovery.protect import protect as protect
    from shardwise.training.fitting.automatic import smaller_plan as smaller_plan
    from shardwise.training.loading.padding import PadToMultiple as PadToMultiple
    from shardwise.training.loading.sampler import DistributedSampler as DistributedSampler
    from shardwise.training.loop.training_step import step as step


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(lazy_names(__file__))
    if name == "capture":
        from shardwise.base.errors import InvalidPlan

        raise InvalidPlan(
            "shardwise.capture is gone: units run as CUDA graphs in any loop (capture = 'auto'); call the step itself"
        )
    if name not in lazy_names(__file__):
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value: object = getattr(import_module(lazy_names(__file__)[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *lazy_names(__file__)})


def _auto_plan() -> Callable[..., Any]:
    from shardwise.training.fitting.automatic import auto_plan

    return auto_plan


register_solver(_auto_plan)
