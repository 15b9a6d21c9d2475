"""The result of an export: files, and the settings that the target cannot express."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields

from shardwise.plan import Plan

# Settings of Shardwise's engine; other tools have nothing that corresponds to them.
_OURS_ALONE = (
    "engine", "collectives", "capture", "prefetch", "reduces_in_flight", "bucket_bytes", "piece_bytes", "dynamic",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The number of machines and of ranks per machine."""

    num_nodes: int = 1
    ranks_per_node: int
    has_gpus: bool = True

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """`files` maps names to texts. `left_out` has one line per setting that the target cannot express."""

    files: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def not_expressed(plan: Plan, *, target: str, expressed: Collection[str]) -> list[str]:
    """Return one line per setting of the plan that differs from the default and that the target does not have."""
    lines = []
    default = Plan()
    for setting in fields(Plan):
        name, value = setting.name, getattr(plan, setting.name)
        if name not in expressed and name not in _OURS_ALONE and value != getattr(default, name):
            shown = dict(value) if isinstance(value, Mapping) else value
            lines.append(f"{name} = {shown}: {target} has no setting for it")
    return lines


def host_notes(plan: Plan, *, target: str) -> list[str]:
    """Return what the target's offload does otherwise: it is for all units, and the CPU updates."""
    if not plan.offload_states:
        return []
    lines = []
    if not isinstance(plan.offload_states, bool):
        lines.append(f"offload_states = {list(plan.offload_states)}: {target} offloads all units; this file says so")
    if plan.offload_update == "device":
        lines.append(f"offload_update = device: under {target} the CPU updates what is offloaded")
    return lines


def file_header(*lines: str, left_out: Iterable[str] = ()) -> str:
    """Return the comment at the head of a file: notes for the user, and what the file does not express."""
    return "".join(f"# {line}\n" for line in (*lines, *(f"Not here: {line}" for line in left_out)))


def plan_text(plan: Plan) -> str:
    """Return the plan as the file that `shardwise train --plan` reads."""
    import tomli_w

    return tomli_w.dumps(plan.to_dict())
