"""What an export gives: files, and what the target cannot express."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from shardwise.plan import Plan

# These say nothing about where the model lies or how its step runs elsewhere.
_OURS_ALONE = ("engine", "collectives", "capture", "prefetch", "reduces_in_flight", "bucket_bytes", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """How many machines, and ranks on each; the container image, for those who run one."""

    num_nodes: int = 1
    ranks_per_node: int
    has_gpus: bool = True
    image: str = ""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Name → text of each file. `left_out`: a line for each setting that the target has no words for."""

    files: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def not_expressed(plan: Plan, *, target: str, expressed: Collection[str]) -> list[str]:
    """A line for each setting of the plan that is not the default and that the target does not know."""
    lines = []
    default = Plan()
    for setting in fields(Plan):
        name, value = setting.name, getattr(plan, setting.name)
        if name in expressed or name in _OURS_ALONE or value == getattr(default, name):
            continue
        shown = dict(value) if isinstance(value, Mapping) else value
        lines.append(f"{name} = {shown}: {target} has no setting for it")
    return lines


def comment(lines: Collection[str], *, sign: str = "#") -> str:
    """Lines as a comment at the head of a file."""
    return "".join(f"{sign} {line}\n" for line in lines)


def plan_text(plan: Plan) -> str:
    """The plan as the file that `shardwise train --plan` reads."""
    import tomli_w

    return tomli_w.dumps(plan.to_dict())
