"""The engines that a bench compares, and which of them can run a case. No torch here: this is asked before any process
is started. Other libraries are set up in peers.py, megatron_peer.py and deepspeed_peer.py.

A name's end says how its steps run (modes.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from shardwise.bench.modes import mode_of, without_mode
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, EngineLimits, Setting, lives_alike
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import AUTO, SHARDED, Placement, placement_of, strategy_of
from shardwise.train.config import TrainConfig
from shardwise.train.config_section import InvalidConfig

# Settings of a plan that other libraries do not have, or that are not set up for them here.
_NOT_BY_PEERS = (
    "keep_fp32", "accumulate_reduced", "recompute_overrides", "overrides", "reduce_dtype", "offload_activations",
    "offload_states", "dynamic", "collectives",
)  # fmt: skip
_PLAIN = Plan()
# Engines of which the solver knows the costs; it has no captured or compiled steps to choose from.
_AUTO_ENGINES = ("shardwise",)
# Optimizers that count their steps, or read their rates, on the host, so that they cannot be captured.
_NOT_CAPTURABLE = ("sgd", "adagrad", "muon")
STAGES: Mapping[str, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""Strategies → the number by which Megatron-FSDP and DeepSpeed call what is sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine. `refuses`: why it cannot run a plan, "" if it can.

    package   the module that has to be there for it; `install`: what pip is told to install it
    """

    what: str
    refuses: Callable[[TrainConfig], str]
    package: str = ""
    install: str = "'shardwise[peers]'"


def plan_for(engine: str, strategy: str, plan: Plan) -> Plan:
    """The plan of a case; `why_not` says what the engine cannot do.

    Only our engine captures by its plan: others' steps are captured by hand (graph_update.py).
    """
    compiler, bare = plan.compiler if plan.compiler != "none" else "inductor", without_mode(engine)
    if strategy == AUTO:
        # It chooses for each unit.
        plan = replace(plan, overrides=Patterns(), recompute_overrides=Patterns())
    return replace(
        plan,
        strategy=strategy,
        engine=bare if bare in LIMITS else "shardwise",
        compile=compiler if mode_of(engine) == "compiled" else "none",
        capture="on" if engine in ("captured", "compiled") else "off",
    )


def why_not(engine: str, strategy: str, config: TrainConfig) -> str:
    """One short reason why this engine cannot run the config under this strategy; "" if it can."""
    if engine not in ENGINES:
        raise UnknownName.of("engine", engine, known=list(ENGINES))
    contestant = ENGINES[engine]
    if strategy == AUTO and engine not in _AUTO_ENGINES:
        return f"auto plans are run by {' and '.join(_AUTO_ENGINES)}"
    try:
        config = replace(config, plan=plan_for(engine, strategy, config.plan))
    except (InvalidPlan, InvalidConfig) as error:
        return str(error)
    if config.optimizer.name == "muon" and contestant.package and placement_of(strategy).optim is SHARDED:
        return f"{engine} would give Muon slices of matrices"
    if contestant.package and find_spec(contestant.package) is None:
        return f"{contestant.package} is not installed: pip install {contestant.install}"
    return (_graph(config, engine=engine) if mode_of(engine) != "eager" else "") or contestant.refuses(config)


def on_gpu(config: TrainConfig) -> bool:
    """Whether its ranks will run on GPUs: the driver's device file is looked for, since torch is not imported yet."""
    return config.run.device == "cuda" or (config.run.device == "auto" and Path("/dev/nvidiactl").exists())


def _nothing(config: TrainConfig) -> str:
    return ""


def _graph(config: TrainConfig, *, engine: str) -> str:
    """Why its steps cannot be CUDA graphs."""
    if not on_gpu(config):
        return f"{engine} needs a GPU"
    if config.optimizer.name in _NOT_CAPTURABLE:
        return f"torch cannot capture the optimizer {config.optimizer.name}"
    if config.train.nonfinite == "skip":
        return "train.nonfinite = 'skip' reads the norm in each step, so that none can be captured"
    if config.plan.precision == "fp16":
        return "precision = 'fp16' looks for overflows in each step, so that none can be captured"
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


def _megatron(config: TrainConfig) -> str:
    reason = _peer(config.plan, engine="megatron-fsdp", can_place=_has_stage)
    return reason or ("" if on_gpu(config) else "megatron-fsdp needs a GPU")


def _deepspeed(config: TrainConfig) -> str:
    """With ZeRO: without it DeepSpeed tells no norm, and keeps no fp32 weights in bf16."""
    return _peer(config.plan, engine="deepspeed", can_place=_has_zero_stage)


def _has_stage(placement: Placement) -> bool:
    return strategy_of(placement) in STAGES


def _has_zero_stage(placement: Placement) -> bool:
    return STAGES.get(strategy_of(placement), 0) > 0


def _peer(plan: Plan, *, engine: str, can_place: Callable[[Placement], bool] = lives_alike) -> str:
    settings = tuple(Setting(key=key, plain=getattr(_PLAIN, key)) for key in _NOT_BY_PEERS)
    reason = _short(EngineLimits(name=engine, can_place=can_place, run_settings=settings), plan)
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
    "captured": Contestant(what="this engine, each step one CUDA graph", refuses=_nothing),
    "compiled": Contestant(what="the same with compiled units", refuses=_nothing),
    "torch": Contestant(what="DistributedDataParallel and fully_shard", refuses=_torch),
    "torch-captured": Contestant(what="the same, each step one CUDA graph", refuses=_torch),
    "torch-compiled": Contestant(what="the same with compiled units", refuses=_torch),
    "accelerate": Contestant(what="Hugging Face Accelerate", refuses=_accelerate, package="accelerate"),
    "lightning": Contestant(what="Lightning Fabric", refuses=_lightning, package="lightning"),
    "megatron-fsdp": Contestant(
        what="Megatron-FSDP", refuses=_megatron, package="megatron_fsdp", install="megatron-fsdp"
    ),
    "megatron-fsdp-captured": Contestant(
        what="the same, each step one CUDA graph", refuses=_megatron, package="megatron_fsdp", install="megatron-fsdp"
    ),
    "deepspeed": Contestant(what="DeepSpeed with ZeRO", refuses=_deepspeed, package="deepspeed", install="deepspeed"),
}
