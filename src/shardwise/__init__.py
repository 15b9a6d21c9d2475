"""Shardwise: train with any strategy from DDP to FSDP; predict its cost, run it, verify the prediction.

Names are loaded when they are first used, so that `import shardwise` and the command line do not
pay for torch (two seconds) until something needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.vocabulary.version import __version__ as __version__

if TYPE_CHECKING:
    from shardwise.data.sampler import DistributedSampler
    from shardwise.engine.engine import tape
    from shardwise.engine.optimizer.scaler import GradScaler
    from shardwise.engine.plan_change.extend import extend
    from shardwise.engine.prepared.average import EMA
    from shardwise.engine.prepared.evaluating import evaluating
    from shardwise.engine.prepared.forward_method import forward_method
    from shardwise.engines import (
        accumulate,
        capture,
        clip_grad_norm_,
        clip_grad_value_,
        edit,
        full_state_dict,
        grad_norms,
        join,
        load_full_state_dict,
        mean_count,
        prepare,
        replan,
        weight_stream,
        whole,
    )
    from shardwise.errors import ShardwiseError
    from shardwise.integrations.lean_causal_loss import lean_loss
    from shardwise.integrations.pretrained import from_pretrained, save_pretrained
    from shardwise.plan import Plan
    from shardwise.plan.mesh import Mesh
    from shardwise.plan.placement import STRATEGIES, Placement
    from shardwise.spec import ModelSpec, TensorSpec, UnitSpec
    from shardwise.tasks import Task, load_task
    from shardwise.train.training_step import step
    from shardwise.units import model_spec

_HOME = {
    "EMA": "shardwise.engine.prepared.average",
    "DistributedSampler": "shardwise.data.sampler",
    "GradScaler": "shardwise.engine.optimizer.scaler",
    "Mesh": "shardwise.plan.mesh",
    "ModelSpec": "shardwise.spec",
    "Placement": "shardwise.plan.placement",
    "Plan": "shardwise.plan",
    "STRATEGIES": "shardwise.plan.placement",
    "ShardwiseError": "shardwise.errors",
    "Task": "shardwise.tasks",
    "TensorSpec": "shardwise.spec",
    "UnitSpec": "shardwise.spec",
    "accumulate": "shardwise.engines",
    "capture": "shardwise.engines",
    "clip_grad_norm_": "shardwise.engines",
    "clip_grad_value_": "shardwise.engines",
    "edit": "shardwise.engines",
    "evaluating": "shardwise.engine.prepared.evaluating",
    "extend": "shardwise.engine.plan_change.extend",
    "forward_method": "shardwise.engine.prepared.forward_method",
    "from_pretrained": "shardwise.integrations.pretrained",
    "full_state_dict": "shardwise.engines",
    "grad_norms": "shardwise.engines",
    "join": "shardwise.engines",
    "lean_loss": "shardwise.integrations.lean_causal_loss",
    "load_full_state_dict": "shardwise.engines",
    "load_task": "shardwise.tasks",
    "mean_count": "shardwise.engines",
    "model_spec": "shardwise.units",
    "prepare": "shardwise.engines",
    "replan": "shardwise.engines",
    "save_pretrained": "shardwise.integrations.pretrained",
    "step": "shardwise.train.training_step",
    "tape": "shardwise.engine.engine",
    "weight_stream": "shardwise.engines",
    "whole": "shardwise.engines",
}

__all__ = [
    "EMA",
    "STRATEGIES",
    "DistributedSampler",
    "GradScaler",
    "Mesh",
    "ModelSpec",
    "Placement",
    "Plan",
    "ShardwiseError",
    "Task",
    "TensorSpec",
    "UnitSpec",
    "accumulate",
    "capture",
    "clip_grad_norm_",
    "clip_grad_value_",
    "edit",
    "evaluating",
    "extend",
    "forward_method",
    "from_pretrained",
    "full_state_dict",
    "grad_norms",
    "join",
    "lean_loss",
    "load_full_state_dict",
    "load_task",
    "mean_count",
    "model_spec",
    "prepare",
    "replan",
    "save_pretrained",
    "step",
    "tape",
    "weight_stream",
    "whole",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
