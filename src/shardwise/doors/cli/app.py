"""`shardwise`: the commands. A user's mistake becomes one line on standard error and exit code 2."""

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from shardwise.base.errors import ShardwiseError
from shardwise.base.vocabulary.printable import printable_lines
from shardwise.base.vocabulary.version import __version__
from shardwise.doors.cli.help_pages import COMMANDS, CommandGroups, GroupedOptions

# Former names of options; they still work, but --help does not show them.
_FORMER_NAMES = {"--nproc": "--ranks", "--strategies": "--strategy"}


class _CommandsByName(Mapping[str, Any]):
    """The commands; each is imported when it is looked up, so that none pays for the imports of the others."""

    def __iter__(self) -> Iterator[str]:
        return (name for group in COMMANDS.values() for name in group)

    def __len__(self) -> int:
        return sum(map(len, COMMANDS.values()))

    def __getitem__(self, name: str) -> Any:
        if name not in list(self):
            raise KeyError(name)
        return _command(name)


@cache
def _command(name: str) -> Any:
    module = import_module(f"shardwise.doors.cli.{'export' if name == 'import' else name}")
    found = getattr(module, "import_" if name == "import" else name)
    holder = typer.Typer(add_completion=False, rich_markup_mode=None, callback=lambda: None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name=name, cls=GroupedOptions)(found)
    return typer.main.get_group(holder).commands[name]


class _Commands(CommandGroups):
    """Accepts former names of options, and --debug after the command as well as before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _CommandsByName()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parts = (argument.partition("=") for argument in args)
        renamed = [_FORMER_NAMES.get(name, name) + equals + value for name, equals, value in parts]
        return super().parse_args(ctx, _debug_first(renamed))


def _debug_first(arguments: list[str]) -> list[str]:
    """Move --debug to the front, unless it comes after `--`, where nothing is an option."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    others = [argument for argument in arguments[:end] if argument != "--debug"]
    return ["--debug"] * (len(others) < end) + others + arguments[end:]


app = typer.Typer(
    name="shardwise", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(asked: bool) -> None:
    if asked:
        from shardwise.base.vocabulary.tested_versions import installed_torch, untested_torch

        print(f"shardwise {__version__}")
        line = untested_torch(installed_torch())
        if line:
            print(line, file=sys.stderr)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; also after the command.")
    ] = False,
) -> None:
    """Train PyTorch models with any strategy from DDP to FSDP: predict its cost, run it, verify the prediction."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. The exit code is 0, 2 for a user's mistake, or 130 for an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(arguments)
    except ShardwiseError as error:
        if _debug_first(arguments)[:1] == ["--debug"]:
            raise
        print(printable_lines(f"{type(error).__name__}: {error}"), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has ended (`| head`); Python would raise the error again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
