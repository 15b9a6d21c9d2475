"""Parses the options of `shardwise plan`: counts, meshes, recompute, clusters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.shared_options import OPTIMIZERS
from shardwise.cli.strategies import comma_separated
from shardwise.cli.terminal import status_line
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.models.adaptation import Adaptation
from shardwise.plan.limits import LIMITS, EngineLimits
from shardwise.plan.mesh import Mesh
from shardwise.planner.systems import System, system_of
from shardwise.spec.losses import LEAN, LOSSES, USUAL
from shardwise.vocabulary.quantities import byte_count

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.hardware.software import Software
    from shardwise.models.reference import Model

GOALS = ("throughput", "memory")
OFFLOADS = ("states", "activations")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def check_names(*, optimizer: str, goal: str = "throughput") -> None:
    for kind, name, known in (("goal", goal, GOALS), ("optimizer", optimizer, OPTIMIZERS)):
        if name not in known:
            raise UnknownName.of(kind, name, known=known)


def parse_count(text: str | None, *, option: str) -> float | None:
    """Parse `1T`, `300B` or `1e12`; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise InvalidPlan(f"{option} {text}: must be a number, such as 1T, 300B or 1e12")
    return float(found[1]) * _COUNTS[found[2]]


def parse_host_memory(text: str | None, *, option: str) -> int | None:
    """Parse `110GiB`, or 0 for none; None if the option is not given."""
    if text is None or text.strip() == "0":
        return None if text is None else 0
    return byte_count(text, key=option)


def parse_offload(text: str | None) -> dict[str, Any]:
    """Parse `states,activations` into the settings of a plan."""
    names = comma_separated(text or "")
    for name in names:
        if name not in OFFLOADS:
            raise UnknownName.of("offload", name, known=OFFLOADS)
    return {f"offload_{name}": True for name in names}


def parse_mesh(text: str | None) -> Mesh | None:
    """Parse `8x4`, replicate × shard; None if the option is not given."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,6})[x×]([1-9][0-9]{0,6})", text.strip())
    if found is None:
        raise InvalidPlan(f"--mesh {text}: must be REPLICATExSHARD, such as 8x8")
    return Mesh(replicate=int(found[1]), shard=int(found[2]))


def hybrid_mesh(strategy: str, *, cluster: "Cluster") -> Mesh | None:
    """Return nodes × devices per node, the default mesh of `hybrid_shard`; None for any other strategy."""
    if strategy.strip().lower().replace("-", "_") != "hybrid_shard":
        return None
    if cluster.num_nodes == 1:
        raise InvalidPlan(f"--strategy {strategy}: {cluster} is one node; give --mesh, such as 2x4")
    return Mesh(replicate=cluster.num_nodes, shard=cluster.devices_per_node)


def parse_recompute(text: str) -> dict[str, Any]:
    """Parse `full`, or `full,blocks.[0-8]=none`, into the settings of a plan."""
    default, overrides = "none", {}
    for part in (part.strip() for part in text.split(",")):
        pattern, equals, way = part.rpartition("=")
        if equals:
            overrides[pattern] = way
        else:
            default = part
    return {"recompute": default, "recompute_overrides": overrides}


def parse_tile(texts: list[str] | None) -> dict[str, int] | None:
    """Parse `*.mlp=8192` into pattern → tokens; None if the option is not given."""
    if not texts:
        return None
    found = {}
    for text in texts:
        pattern, equals, tokens = text.partition("=")
        if not (equals and pattern and tokens.isdecimal() and int(tokens)):
            raise InvalidPlan(f"--tile {text}: must be MODULES=TOKENS, such as *.mlp=8192")
        found[pattern] = int(tokens)
    return found


def planned_cluster(
    text: str,
    *,
    devices: Path | None,
    software: "SoftwareOptions",
    matmul_precision: str | None,
    here: bool,
    fabric_gbps: float | None = None,
    host_bytes: int | None = None,
) -> "Cluster":
    from shardwise.hardware import cluster_of
    from shardwise.hardware.cluster import plain_fabric
    from shardwise.hardware.cluster_file import read_cluster_file
    from shardwise.hardware.host_here import probed_cluster

    cluster = cluster_of(text)
    if devices is not None:
        measured = read_cluster_file(devices)
        cluster = replace(cluster, device=measured.device, link=measured.link or cluster.link)
    device = replace(
        cluster.device,
        software=software.on(cluster.device.software),
        matmul_precision=matmul_precision or cluster.device.matmul_precision,
    )
    cluster = replace(cluster, device=device, host_bytes=cluster.host_bytes if host_bytes is None else host_bytes)
    if fabric_gbps is not None:
        if cluster.num_nodes == 1:
            raise InvalidPlan(f"--fabric-gbps {fabric_gbps:g}: {cluster} is one node; say how many: 2x{cluster}")
        cluster = replace(cluster, fabric=plain_fabric(fabric_gbps), assumes_fabric=False)
    return probed_cluster(cluster) if here else cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareOptions:
    """The options that say which kernels run; None where one is not given."""

    preset: str | None
    attention: str | None
    matmul: str | None
    norms: str | None

    def on(self, base: "Software") -> "Software":
        from shardwise.hardware.software import chosen_software

        return chosen_software(base, preset=self.preset, attention=self.attention, matmul=self.matmul, norms=self.norms)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSettings:
    """The options that `--like` sets, each as it was given or as the system has it; `text` names them."""

    system: System
    engine: str
    strategy: str
    reduce_dtype: str
    accumulate_reduced: bool
    loss: str
    tile: Mapping[str, int]

    @property
    def text(self) -> str:
        if not self.system.name:
            return ""
        passes = "in every pass" if self.accumulate_reduced else "once per step"
        return (
            f"Like {self.system.name} ({self.system.title}): --engine {self.engine} --strategy {self.strategy} "
            f"--overlap {self.system.overlap} --loss {self.loss} --reduce-dtype {self.reduce_dtype}{self._memory}, "
            f"gradients reduced {passes}. Source: {self.system.source}."
        )

    @property
    def _memory(self) -> str:
        tiles = "".join(f" --tile {pattern}={tokens}" for pattern, tokens in self.tile.items())
        return f"{tiles}, expandable segments" if self.system.is_expandable else tiles


def _system_tile(system: System, *, model: str) -> dict[str, int]:
    if not system.tile_tokens:
        return {}
    from shardwise.models.catalogue import kind_of
    from shardwise.models.transformers_shapes import TRANSFORMERS_SHAPES

    is_ours = not kind_of(model)[0] and model not in TRANSFORMERS_SHAPES
    return {"*.feed_forward" if is_ours else "*.mlp": system.tile_tokens}


def system_settings(
    like: str,
    *,
    model: str,
    engine: str | None,
    strategy: str | None,
    precision: str,
    reduce_dtype: str | None,
    accumulate_reduced: bool | None,
    overlap: str | None,
    loss: str | None,
    tile: Mapping[str, int] | None,
) -> SystemSettings:
    """Return the settings of `--like`, or the defaults; what is given wins."""
    system = system_of(like.strip().lower())
    system = replace(system, overlap=overlap or system.overlap)
    engine = engine or system.engine
    as_computed = system.reduces_as_computed and precision in ("bf16", "fp16")
    limits = _limits_of(engine)
    if loss is not None and loss not in LOSSES:
        raise UnknownName.of("loss", loss, known=LOSSES)
    return SystemSettings(
        system=system,
        engine=engine,
        strategy=strategy or ",".join(system.strategies) or "all",
        reduce_dtype=reduce_dtype or (precision if as_computed else "fp32"),
        accumulate_reduced=system.accumulate_reduced if accumulate_reduced is None else accumulate_reduced,
        loss=loss or (system.loss if system.name else LEAN if limits.has_lean_loss else USUAL),
        tile=_system_tile(system, model=model) if tile is None else tile,
    )


def _limits_of(engine: str) -> EngineLimits:
    """Return what an engine cannot do; nothing of one that does not exist, which the plan refuses."""
    return LIMITS.get(engine, EngineLimits(name=engine))


def model_of(
    model: str,
    *,
    seq: int | None,
    image: int | None,
    loss: str | None,
    chosen: SystemSettings,
    adaptation: Adaptation | None = None,
) -> "Model":
    """Return the model with the chosen loss; `loss`: as it was given. Only catalogue models have the lean one."""
    from shardwise.models.reference import Model

    named = Model(
        model,
        seq=seq,
        image=image,
        loss=chosen.loss,
        adaptation=adaptation,
        while_tracing=lambda name: status_line(f"Tracing {name} …"),
    )
    if loss == LEAN and not named.has_lean_loss:
        raise InvalidPlan(
            f"--loss {loss}: {model} has a loss of its own; only catalogue models of tokens have this one"
        )
    return named
