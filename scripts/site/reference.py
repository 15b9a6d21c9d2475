"""The reference, made from the code: the names of `shardwise.__all__`, and the options of the command line."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import typer

import shardwise
from shardwise.base.files.keys import reference as key_reference
from shardwise.doors.cli.app import app
from shardwise.doors.cli.help_pages import COMMANDS
from shardwise.training.config.config import SECTIONS

_ROW = re.compile(r"(?P<name>\S(?: ?\S)*) {2,}(?P<text>\S.*)")
# Longer signatures have one argument per line.
_WIDTH = 100


# Python


def python_page() -> str:
    """Every public name: its signature, what it is for, and of a class also its fields and methods."""
    lines = [
        "# Python reference",
        "",
        "Every name that `import shardwise` offers, as the code describes it. "
        "The subpackage `shardwise.integrations` has [a page of its own](../integrations.md).",
        "",
    ]
    for name in sorted(shardwise.__all__, key=str.lower):
        lines += _entry(name, getattr(shardwise, name))
    return "\n".join(lines)


def _entry(name: str, value: object) -> Iterator[str]:
    yield from (f"## {name}", "")
    if inspect.isclass(value):
        yield from _class(name, value)
    elif callable(value):
        yield from _code(_signature(name, value))
        yield from docstring(inspect.getdoc(value))
    else:
        yield from _table_of(value)


def _class(name: str, value: type) -> Iterator[str]:
    if not issubclass(value, Exception):
        yield from _code(_signature(name, value))
    yield from docstring(inspect.getdoc(value))
    for method, member in vars(value).items():
        if method.startswith("_") or inspect.getdoc(member) is None:
            continue
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if is_dataclass(value) and method in {field.name for field in fields(value)}:
            continue
        yield from (f"### {name}.{method}", "")
        if inspect.isfunction(function):
            yield from _code(_signature(f"{name}.{method}", function, is_method=not isinstance(member, staticmethod)))
        yield from docstring(inspect.getdoc(member))


def _signature(name: str, value: object, *, is_method: bool = False) -> str:
    signature = inspect.signature(value)
    parameters = list(signature.parameters.values())[1 if is_method else 0 :]
    # A class gives an object of itself, which its name says.
    returns = inspect.Signature.empty if inspect.isclass(value) else signature.return_annotation
    signature = signature.replace(parameters=parameters, return_annotation=returns)
    line = _short(f"{name}{signature}")
    if len(line) <= _WIDTH:
        return line
    return _short(f"{name}{_one_per_line(signature)}")


def _one_per_line(signature: inspect.Signature) -> str:
    lines, was_keyword_only = ["("], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not was_keyword_only:
            lines.append("    *,")
            was_keyword_only = True
        lines.append(f"    {parameter},")
    returns = signature.return_annotation
    arrow = "" if returns is inspect.Signature.empty else f" -> {inspect.formatannotation(returns)}"
    return "\n".join([*lines, f"){arrow}"])


def _short(text: str) -> str:
    """Without the modules that types live in, and without a factory that only says 'empty'."""
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    return re.sub(r"<factory>", "…", text.replace("~", ""))


def _code(text: str) -> Iterator[str]:
    yield from ("```python", text, "```", "")


def _table_of(strategies: object) -> Iterator[str]:
    """`STRATEGIES`, the one public name that is a mapping."""
    assert isinstance(strategies, Mapping)
    yield from ("Strategy → placement.", "")
    yield from ("| strategy | params | grads | optim | freed after forward |", "|---|---|---|---|---|")
    for name, placement in strategies.items():
        states = " | ".join(getattr(placement, state).value for state in ("params", "grads", "optim"))
        freed = "–" if placement.params.value == "replicated" else "yes" if placement.reshard_after_forward else "no"
        yield f"| `{name}` | {states} | {freed} |"
    yield ""


def docstring(text: str | None) -> Iterator[str]:
    """Paragraphs stay; names with their meaning beside them become a table; what is indented stays code."""
    for block in (text or "").strip("\n").split("\n\n"):
        lines = block.splitlines()
        if lines and _ROW.fullmatch(lines[0]) and len(lines[0]) - len(lines[0].lstrip()) == 0:
            yield from _rows(lines)
        elif lines and all(line.startswith("    ") for line in lines):
            yield from ("```text", *(line[4:] for line in lines), "```")
        else:
            yield from (line.strip() for line in lines)
        yield ""


def _rows(lines: list[str]) -> Iterator[str]:
    """name   what it is, over one or several lines."""
    rows: list[list[str]] = []
    for line in lines:
        found = _ROW.fullmatch(line)
        if found is not None and not line.startswith(" "):
            rows.append([found["name"], found["text"]])
        else:
            rows[-1][1] += " " + line.strip()
    yield from ("| | |", "|---|---|")
    yield from (f"| `{name}` | {cell(text)} |" for name, text in rows)


def cell(text: str) -> str:
    """Text in a table, in which a bar would end it."""
    return text.replace("|", "\\|")


# The config


def config_page() -> str:
    """Every key of a config of `shardwise train`, by section."""
    lines = [
        "# Config reference",
        "",
        "Every key of CONFIG.toml for [`shardwise train`](../train.md), as `shardwise train --keys` prints them. "
        "The keys of `[plan]` are also the fields of [`Plan`](python.md#plan) and the keys of a plan file. "
        "– means left out.",
        "",
    ]
    for name, section in SECTIONS.items():
        lines += [f"## [{name}]", "", "| key | default | |", "|---|---|---|"]
        lines += [f"| `{key}` | {cell(default)} | {cell(what)} |" for key, default, what in key_reference(section)]
        lines.append("")
    return "\n".join(lines)


# The command line


def command_line_page() -> str:
    """Every command with its arguments and options."""
    group = typer.main.get_command(app)
    lines = [
        "# Command line reference",
        "",
        "Every command and option of `shardwise`, as `--help` describes them. A command exits with 0; with 1 if it ran "
        "and the answer is no (nothing fits, findings, trainings that differ); with 2 after a mistake in what was "
        "asked, with one line that says what is wrong.",
        "",
    ]
    for command in _commands(group, path="shardwise"):
        lines += command
    return "\n".join(lines)


# Commands and options are those of the click that typer brings along, which is no public name of typer.


def _commands(command: Any, *, path: str) -> Iterator[Iterator[str]]:
    yield _command(command, path=path)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, path=f"{path} {name}")


def _command(command: Any, *, path: str) -> Iterator[str]:
    yield from (f"## {path}", "")
    if not hasattr(command, "commands"):
        yield from ("```text", " ".join([path, "[OPTIONS]", *_arguments(command)]), "```", "")
    yield from docstring(inspect.cleandoc(command.help or ""))
    example = next((group[command.name] for group in COMMANDS.values() if command.name in group), "")
    if example and path.count(" ") == 1:
        yield from ("```text", example, "```", "")
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    if shown:
        yield from ("| | | default |", "|---|---|---|")
        yield from map(_option, shown)
        yield ""


def _arguments(command: Any) -> Iterator[str]:
    for one in command.params:
        if one.param_type_name == "argument":
            name = one.metavar or one.name.upper()
            yield name if one.required else f"[{name}]"


def _option(one: Any) -> str:
    text = cell(one.help or "")
    if one.param_type_name == "argument":
        return f"| `{one.metavar or one.name.upper()}` | {text} | {'required' if one.required else '–'} |"
    names = ", ".join(f"`{name}`" for name in [*one.opts, *one.secondary_opts])
    return f"| {names} | {text} | {_default(one)} |"


def _default(one: Any) -> str:
    if one.required:
        return "required"
    if one.is_flag or one.default is None or callable(one.default) or one.default in ("", (), []):
        return "–"
    return f"`{one.default}`"
