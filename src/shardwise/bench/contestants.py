"""The engines that a bench compares, and which of them can run a case. No torch here: this is asked before any process
is started. Accelerate and Lightning are set up in peers.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from shardwise.engine_limits import LIMITS, EngineLimits, Setting, lives_alike
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.placement import SHARDED, placement_of
from shardwise.plan import Plan
from shardwise.train.config import TrainConfig

# Settings of a plan that Accelerate and Lightning do not have, or that peers.py does not set up.
_NOT_BY_PEERS = (
    "keep_fp32", "accumulate_reduced", "recompute_overrides", "overrides", "reduce_dtype", "offload_activations",
    "offload_states", "dynamic", "collectives",
)  # fmt: skip
_PLAIN = Plan()
# Optimizers that count their steps on the host, so that they cannot be captured.
_NOT_CAPTURABLE = ("sgd", "adagrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine. `package`: what has to be installed for it; `refuses`: why it cannot run a plan, "" if it can."""

    what: str
    refuses: Callable[[TrainConfig], str]
    package: str = ""


def plan_for(engine: str, strategy: str, plan: Plan) -> Plan:
    """The plan of a case; `why_not` says what the engine cannot do."""
    return replace(
        plan,
        strategy=strategy,
        engine="torch" if engine == "torch" else "shardwise",
        capture="on" if engine == "captured" else "off",
    )


def why_not(engine: str, strategy: str, config: TrainConfig) -> str:
    """One short reason why this engine cannot run the config under this strategy; "" if it can."""
    if engine not in ENGINES:
        raise UnknownName.of("engine", engine, known=list(ENGINES))
    contestant = ENGINES[engine]
    try:
        config = replace(config, plan=plan_for(engine, strategy, config.plan))
    except InvalidPlan as error:
        return str(error)
    if contestant.package and find_spec(contestant.package) is None:
        return f"{contestant.package} is not installed: pip install 'shardwise[peers]'"
    return contestant.refuses(config)


def on_gpu(config: TrainConfig) -> bool:
    """Whether its ranks will run on GPUs: the driver's device file is looked for, since torch is not imported yet."""
    return config.run.device == "cuda" or (config.run.device == "auto" and Path("/dev/nvidiactl").exists())


def _nothing(config: TrainConfig) -> str:
    return ""


def _captured(config: TrainConfig) -> str:
    if not on_gpu(config):
        return "captured needs a GPU"
    if config.optimizer.name in _NOT_CAPTURABLE:
        return f"torch cannot capture the optimizer {config.optimizer.name}"
    return ""


def _torch(config: TrainConfig) -> str:
    return _short(LIMITS["torch"], config.plan)


def _accelerate(config: TrainConfig) -> str:
    reason = _peer(config.plan, engine="accelerate")
    if not reason and placement_of(config.plan.strategy).params is SHARDED and not on_gpu(config):
        return "accelerate has FSDP on GPUs only"
    return reason


def _lightning(config: TrainConfig) -> str:
    return _peer(config.plan, engine="lightning")


def _peer(plan: Plan, *, engine: str) -> str:
    settings = tuple(Setting(key=key, plain=getattr(_PLAIN, key)) for key in _NOT_BY_PEERS)
    reason = _short(EngineLimits(name=engine, can_place=lives_alike, run_settings=settings), plan)
    if reason:
        return reason
    if plan.precision not in ("fp32", "bf16"):
        return f"{engine} runs in fp32 and bf16 here, not in {plan.precision}"
    if plan.recompute == "selective":
        return f"{engine} has no recompute = 'selective'"
    if plan.mesh is not None and plan.mesh.replicate > 1 and placement_of(plan.strategy).params is SHARDED:
        return f"{engine} shards over all ranks here, not over a mesh {plan.mesh.replicate}×{plan.mesh.shard}"
    return ""


def _short(limits: EngineLimits, plan: Plan) -> str:
    refusal = limits.why_not(plan)
    return f"{limits.name} has no {refusal.lacks}" if refusal is not None else ""


ENGINES: Mapping[str, Contestant] = {
    "shardwise": Contestant(what="this engine", refuses=_nothing),
    "captured": Contestant(what="this engine, each step one CUDA graph", refuses=_captured),
    "torch": Contestant(what="DistributedDataParallel and fully_shard", refuses=_torch),
    "accelerate": Contestant(what="Hugging Face Accelerate", refuses=_accelerate, package="accelerate"),
    "lightning": Contestant(what="Lightning Fabric", refuses=_lightning, package="lightning"),
}
