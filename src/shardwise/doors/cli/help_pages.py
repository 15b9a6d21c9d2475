"""What `--help` shows: commands in groups, an example for each command, and the many options of a command in groups."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Group → command → example.
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "plan": "shardwise plan llama-3.1-8b --cluster 8xh100-80gb",
        "rent": "shardwise rent llama-3.1-8b --tokens 2B --max-price 500",
        "explain": "shardwise explain fsdp --ranks 4",
        "models": "shardwise models",
        "devices": "shardwise devices h200",
    },
    "Train": {
        "train": "shardwise train CONFIG.toml --ranks 2 --strategy fsdp",
        "tokens": "shardwise tokens texts/ --out data/texts",
        "checkpoint": "shardwise checkpoint inspect RUN",
    },
    "Measure": {
        "bench": "shardwise bench CONFIG.toml --strategy ddp,fsdp --ranks 2 --out out",
        "report": "shardwise report out",
        "profile": "shardwise profile gpt-tiny --ranks 8",
        "calibrate": "shardwise calibrate --out here.toml",
    },
    "Diagnose": {
        "doctor": "shardwise doctor CONFIG.toml",
        "autopsy": "shardwise autopsy RUN",
    },
    "Exchange": {
        "export": "shardwise export plan.toml --to accelerate --out configs",
        "import": "shardwise import ds_config.json --out plan.toml",
    },
}

_LIST_TYPE = re.compile(r" <list\[\w+\]>")

# Command → group → options.
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": {
        "Job": (
            *("--cluster", "--fabric-gbps", "--seq", "--lengths", "--image", "--global-batch", "--optimizer", "--loss"),
            *("--lora", "--lora-targets", "--quantize"),
        ),
        "Plan (what is not given is chosen)": (
            *("--strategy", "--goal", "--budget", "--host-memory", "--offload", "--micro-batch", "--accumulate"),
            *(
                "--accumulate-reduced",
                "--mesh",
                "--across",
                "--units",
                "--precision",
                "--reduce-dtype",
                "--recompute",
                "--tile",
            ),
            *("--compile", "--update", "--capture", "--overlap"),
        ),
        "Engine, kernels and measured devices": (
            *("--engine", "--like", "--devices", "--here", "--software", "--attention", "--matmul", "--norms"),
            "--matmul-precision",
        ),
        "Time and cost of a training": ("--tokens", "--price"),
        "Output": ("--save", "--frontier", "--scale", "--timeline", "--json", "--help"),
        "Planner page": ("--serve", "--port", "--browser"),
    },
}


class CommandGroups(TyperGroup):
    """Lists commands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups = {group: tuple(names) for group, names in COMMANDS.items()}
        for group, names in _grouped(groups, self.list_commands(ctx)):
            found = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            with formatter.section(group):
                formatter.write_dl([(name, command.get_short_help_str(limit=100)) for name, command in found])


class GroupedOptions(TyperCommand):
    """Lists options by group, where the command has groups, and ends with an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = {parameter.opts[0]: parameter for parameter in self.get_params(ctx)}
        arguments = tuple(name for name in parameters if not name.startswith("-"))
        groups = OPTIONS.get(self.name or "", {"Options": tuple(name for name in parameters if name not in arguments)})
        for title, names in _grouped({"Arguments": arguments, **groups}, list(parameters)):
            records = [record for name in names if (record := parameters[name].get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl([(_LIST_TYPE.sub("", name), text) for name, text in records])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        # `checkpoint export` has the name of another command.
        example = {name: one for group in COMMANDS.values() for name, one in group.items()}.get(self.name or "")
        if example and ctx.parent.parent is None:
            with formatter.section("Example"):
                formatter.write_text(example)


def _grouped(groups: Mapping[str, tuple[str, ...]], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each group with those of its names that there are; at the end, names without a group."""
    listed = {name for members in groups.values() for name in members}
    for group, members in (*groups.items(), ("Other", tuple(name for name in names if name not in listed))):
        found = [name for name in members if name in names]
        if found:
            yield group, found
