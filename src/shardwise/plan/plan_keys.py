"""The settings of a plan: each with its default, what it means and what it may be."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.base.files.form import Form, WrongForm, one_of, whole
from shardwise.base.files.keys import key
from shardwise.plan.limits import LIMITS
from shardwise.plan.patterns import POLICY, SOME_UNITS, Patterns, pattern_list, pattern_table
from shardwise.plan.placement import ACROSS, AUTO, OVERRIDE, STRATEGY, Mesh, Placement

_RECOMPUTES = ("none", "full", "selective")
_CAPTURES = ("auto", "off")
# Plans of earlier versions: the first has the same meaning, whole steps are no longer graphs.
_UNITS, _STEPS = ("units",), ("on", True)


def _read_capture(value: Any, path: str) -> str:
    if value in _STEPS:
        raise WrongForm(
            f"{path} = {value!r} is gone: {path} = 'auto' runs units as CUDA graphs in any loop, nothing else is needed"
        )
    return "auto" if value in _UNITS else value or "off"


_CAPTURE = Form(
    words=one_of(_CAPTURES).words,
    fits=lambda value: isinstance(value, bool | str) and value in (*_CAPTURES, *_UNITS, *_STEPS, False),
    read=_read_capture,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKeys:
    """All keys of a plan; `Plan` checks them and says what follows."""

    strategy: str = key(
        "fsdp",
        "placement of every unit without an override. Names of other libraries are replaced: no_shard by ddp; zero3, "
        "full_shard and, with a mesh, hybrid_shard by fsdp. auto: the planner chooses a placement and a recompute for "
        "each unit before a run (Plan.auto, shardwise train)",
        form=STRATEGY,
    )
    across: str = key(
        ACROSS[0],
        "strategy over the replicate axis of the mesh, where parameters are sharded: ddp repeats everything; zero1 "
        "shards optimizer state over all ranks and zero2 gradients too, and parameters are still gathered inside the "
        "shard axis",
        choices=ACROSS,
    )
    overrides: Mapping[str, str | Placement] = key(
        Patterns(),
        "strategy or placement of the units that a pattern (`blocks.0`, `blocks.*`) matches; a later pattern wins",
        form=pattern_table(OVERRIDE),
    )
    units: str = key("auto", "policy by which the model is cut into units", form=POLICY)
    mesh: Mesh | None = key(None, "replicate × shard (default: all ranks on the shard axis)")
    micro_batch: int | None = key(None, "samples per rank per pass (default: your loop decides)", least=1)
    accumulate: int = key(1, "passes per optimizer step", least=1)
    accumulate_reduced: bool = key(
        False,
        "each of those passes reduces its gradients: less memory, more communication. What `across` shards is reduced "
        "over the shard axis in each pass, and over both with this",
    )
    precision: str = key(
        "fp32",
        "dtype in which units compute; fp8: bf16, and large linear layers of units multiply in fp8; native leaves the "
        "dtypes of the modules alone",
        choices=("fp32", "bf16", "fp16", "fp8", "native"),
    )
    keep_fp32: tuple[str, ...] = key(
        (), "modules (`*.norm*`, `head`) that compute in fp32 in any case", form=pattern_list("module")
    )
    fp8_recipe: str = key(
        "tensorwise",
        "scales of fp8 values: one per tensor, and sharded weights are gathered in fp8; or one per row (rowwise): more "
        "accurate and slower, and weights are gathered in bf16",
        choices=("tensorwise", "rowwise"),
    )
    fp8_min_features: int = key(
        1024, "linear layers with fewer input or output features multiply in bf16 under precision = 'fp8'", least=1
    )
    keep_bf16: tuple[str, ...] = key(
        (),
        "modules (`layers.0`, `*.wo`) whose linear layers multiply in bf16 under precision = 'fp8'",
        form=pattern_list("module"),
    )
    reduce_dtype: str = key("fp32", "dtype in which gradients are summed", choices=("fp32", "bf16", "fp16"))
    recompute: str = key(
        "none",
        "activations that backward computes again: none of a unit; all (full); all but the outputs of matrix products "
        "and attention (selective). The root's activations are kept",
        choices=_RECOMPUTES,
    )
    recompute_overrides: Mapping[str, str] = key(
        Patterns(),
        "recompute of the units that a pattern matches; a later pattern wins",
        form=pattern_table(one_of(_RECOMPUTES)),
    )
    tile: Mapping[str, int] = key(
        Patterns(),
        "modules (`*.mlp`) that act on each token by itself, computed in tiles of so many tokens, and again in "
        "backward: long sequences in less memory; with the head (`lm_head`) also the loss. A later pattern wins",
        form=pattern_table(whole(least=1), of="module"),
    )
    offload_activations: bool | tuple[str, ...] = key(
        False,
        "tensors that a unit saves for backward wait in host memory: of all units, or of those that patterns match",
        form=SOME_UNITS,
    )
    offload_states: bool | tuple[str, ...] = key(
        False,
        "sharded optimizer state and sharded parameters live in host memory: of all units, or of those that patterns "
        "match",
        form=SOME_UNITS,
    )
    offload_update: str = key(
        "device",
        "where states in host memory are updated. device: they pass through the device, which computes the next "
        "forward meanwhile; host: the CPU updates them, and their gradients are copied to host memory",
        choices=("device", "host"),
    )
    update: str = key(
        "step",
        "when sharded states are updated: by optimizer.step(), or inside backward as soon as gradients are averaged, "
        "so that they never exist all at once. Then nothing may come between: no clipping, no scaler. auto: strategy = "
        "'auto' takes what is faster; step under all others",
        choices=("step", "backward", AUTO),
    )
    prefetch: int = key(1, "units gathered ahead of the one that computes", least=0)
    reduces_in_flight: int = key(1, "gradient reductions that may run at the same time", least=1)
    bucket_bytes: int = key(
        25 * 2**20, "least size of gradients that are reduced together, where gradients are replicated", least=1
    )
    piece_bytes: int | None = key(
        None,
        "most bytes, without padding, of a buffer in which sharded gradients are reduced: those of a larger unit are "
        "reduced in pieces, one after the other, in less memory and more time (default: 2**29 for the root, "
        "embeddings and heads; blocks in one piece); 0: every unit in one piece. A unit has at most 256",
        least=0,
    )
    owned: tuple[str, ...] = key(
        (),
        "parameters (`blocks.*.weight`) of which one rank holds the whole optimizer state and steps the whole "
        "parameter, where optimizer state is sharded. `prepare` adds those whose optimizer needs it",
        form=pattern_list("parameter"),
    )
    dynamic: bool = key(
        False,
        "the order of units differs between steps or between ranks: the ranks agree on each gather, which costs time. "
        "Units that are only skipped now and then do not need it",
    )
    compile: str = key(
        "none",
        "backend of torch.compile, for each unit but the root. auto: a planner that chooses the plan may choose "
        "inductor, with which results differ by rounding; any other plan does not compile",
        choices=("none", "inductor", "aot_eager", AUTO),
    )
    capture: str = key(
        "auto",
        "units run as CUDA graphs, in any loop: where that is safe and faster (auto), or never (off)",
        form=_CAPTURE,
    )
    uncaptured: tuple[str, ...] = key(
        (),
        "units (`blocks.3`) whose forward does something in Python at every call that a CUDA graph would leave out, "
        "such as counting: they are in no graph",
        form=pattern_list("unit"),
    )
    engine: str = key(
        "shardwise", "Shardwise's own engine, or the same plan on torch's DDP and fully_shard", choices=LIMITS
    )
    collectives: str = key(
        "backend", "collectives of the backend, or our ring of sends and receives", choices=("backend", "ring")
    )
