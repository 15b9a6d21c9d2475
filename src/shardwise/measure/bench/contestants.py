"""The engines that a bench compares, and which of them can run a case. No torch here, since no process has started yet.

The end of an engine's name says how its steps run (modes.py). Other libraries are set up in peers.py, megatron_peer.py
and deepspeed_peer.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.measure.bench.modes import mode_of, without_mode
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, EngineLimits, Setting, lives_alike
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import AUTO, Placement, placement_of, strategy_of
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_section import InvalidConfig

# Settings of a plan that other libraries lack, or that are not set up for them here.
_NOT_BY_PEERS = (
    "keep_fp32", "accumulate_reduced", "recompute_overrides", "overrides", "reduce_dtype", "offload_activations",
    "offload_states", "dynamic", "collectives",
)  # fmt: skip
_PLAIN = Plan()
# Engines whose costs the solver knows: it does not consider CUDA graphs or compiled units.
_AUTO_ENGINES = ("shardwise",)
# Optimizers that count steps or read learning rates on the host, so that no graph can contain them.
_NOT_CAPTURABLE = ("sgd", "adagrad", "muon")
STAGES: Mapping[str, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""Strategy → its ZeRO stage in Megatron-FSDP and DeepSpeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine.

    package     the module of another library that it needs; `install`: the arguments of pip that install it
    can_place   whether another library can run a unit of this placement
    """

    package: str = ""
    install: str = "'shardwise[peers]'"
    can_place: Callable[[Placement], bool] = lives_alike


def plan_for(engine: str, strategy: str, plan: Plan) -> Plan:
    """Return the plan of a case, whether or not the engine can run it (`why_not`).

    Only our engine has CUDA graphs by its plan; the steps of others are captured by hand (graph_update.py).
    """
    compiler, bare = plan.compiler if plan.compiler != "none" else "inductor", without_mode(engine)
    if strategy == AUTO:
        # The solver chooses for each unit.
        plan = replace(plan, overrides=Patterns(), recompute_overrides=Patterns())
    return replace(
        plan,
        strategy=strategy,
        engine=bare if bare in LIMITS else "shardwise",
        compile=compiler if mode_of(engine) == "compiled" else "none",
        capture="auto" if engine in ("captured", "compiled") else "off",
    )


def why_not(engine: str, strategy: str, config: TrainConfig) -> str:
    """Return one short reason why this engine cannot run the config under this strategy, or ""."""
    if engine not in ENGINES:
        raise UnknownName.of("engine", engine, known=list(ENGINES))
    contestant = ENGINES[engine]
    if strategy == AUTO and engine not in _AUTO_ENGINES:
        return f"auto plans are run by {' and '.join(_AUTO_ENGINES)}"
    try:
        config = replace(config, plan=plan_for(engine, strategy, config.plan))
    except (InvalidPlan, InvalidConfig) as error:
        return str(error)
    if config.optimizer.name == "muon" and contestant.package and placement_of(strategy).optim.is_sharded:
        return f"{engine} would give Muon slices of matrices"
    if contestant.package and find_spec(contestant.package) is None:
        return f"{contestant.package} is not installed: pip install {contestant.install}"
    reason = _why_not_captured(config, engine=engine) if mode_of(engine) != "eager" else ""
    if reason or not contestant.package:
        return reason or _lacks(LIMITS[config.plan.engine], config.plan)
    return _why_not_by_peer(contestant, config, name=without_mode(engine))


def on_gpu(config: TrainConfig) -> bool:
    """Return whether ranks will run on GPUs. It looks for the driver's device file, since torch is not imported yet."""
    return config.run.device == "cuda" or (config.run.device == "auto" and Path("/dev/nvidiactl").exists())


def _why_not_captured(config: TrainConfig, *, engine: str) -> str:
    """Return why its units, or its whole steps where they are captured by hand, cannot be CUDA graphs, or ""."""
    if not on_gpu(config):
        return f"{engine} needs a GPU"
    if without_mode(engine) == "shardwise":
        return "" if config.plan.captures else "units of this plan cannot be CUDA graphs"
    if config.optimizer.name in _NOT_CAPTURABLE:
        return f"torch cannot capture the optimizer {config.optimizer.name}"
    if config.train.nonfinite == "skip":
        return "train.nonfinite = 'skip' reads the norm in each step, so that none can be captured"
    if config.plan.precision == "fp16":
        return "precision = 'fp16' looks for overflows in each step, so that none can be captured"
    return ""


def _why_not_by_peer(contestant: Contestant, config: TrainConfig, *, name: str) -> str:
    plan = config.plan
    settings = tuple(Setting(key=key, plain=getattr(_PLAIN, key)) for key in _NOT_BY_PEERS)
    reason = _lacks(EngineLimits(name=name, can_place=contestant.can_place, run_settings=settings), plan)
    if reason:
        return reason
    is_sharded = placement_of(plan.strategy).params.is_sharded
    if plan.precision not in ("fp32", "bf16"):
        return f"{name} runs in fp32 and bf16 here, not in {plan.precision}"
    if plan.recompute == "selective":
        return f"{name} has no recompute = 'selective'"
    if plan.mesh is not None and plan.mesh.replicate > 1 and is_sharded:
        return f"{name} shards over all ranks here, not over a mesh {plan.mesh.replicate}×{plan.mesh.shard}"
    if name == "accelerate" and is_sharded and not on_gpu(config):
        return "accelerate has FSDP on GPUs only"
    if name == "megatron-fsdp" and not on_gpu(config):
        return "megatron-fsdp needs a GPU"
    return ""


def _lacks(limits: EngineLimits, plan: Plan) -> str:
    refusal = limits.why_not(plan)
    return f"{limits.name} has no {refusal.lacks}" if refusal is not None else ""


def _has_stage(placement: Placement) -> bool:
    return strategy_of(placement) in STAGES


def _has_zero_stage(placement: Placement) -> bool:
    # Without ZeRO, DeepSpeed reports no norm, and keeps no fp32 weights in bf16.
    return STAGES.get(strategy_of(placement), 0) > 0


ENGINES: Mapping[str, Contestant] = {
    # Our engine, and torch's DistributedDataParallel and fully_shard.
    **dict.fromkeys(("shardwise", "captured", "compiled", "torch", "torch-captured", "torch-compiled"), Contestant()),
    "accelerate": Contestant(package="accelerate"),
    # Lightning Fabric.
    "lightning": Contestant(package="lightning"),
    **dict.fromkeys(
        ("megatron-fsdp", "megatron-fsdp-captured"),
        Contestant(package="megatron_fsdp", install="megatron-fsdp", can_place=_has_stage),
    ),
    "deepspeed": Contestant(package="deepspeed", install="deepspeed", can_place=_has_zero_stage),
}
