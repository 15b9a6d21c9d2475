"""`shardwise`: the commands, and the one place where a user's mistake becomes one line and exit code 2."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwise.cli.autopsy import autopsy
from shardwise.cli.bench import bench
from shardwise.cli.calibrate import calibrate
from shardwise.cli.checkpoint import checkpoint
from shardwise.cli.devices import devices
from shardwise.cli.doctor import doctor
from shardwise.cli.explain import explain
from shardwise.cli.export import export, import_
from shardwise.cli.models import models
from shardwise.cli.plan import plan
from shardwise.cli.profile import profile
from shardwise.cli.report import report
from shardwise.cli.tokens import tokens
from shardwise.cli.train import train
from shardwise.errors import ShardwiseError
from shardwise.vocabulary.version import __version__

# Spellings that still work, and are shown nowhere.
_FORMERLY = {"--nproc": "--ranks", "--strategies": "--strategy"}


class _Commands(TyperGroup):
    """Takes former spellings of options, and --debug after the command as well as before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _debug_first([_current(argument) for argument in args]))


def _current(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return _FORMERLY.get(name, name) + equals + value


def _debug_first(arguments: list[str]) -> list[str]:
    """What follows `--` is no option."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    others = [argument for argument in arguments[:end] if argument != "--debug"]
    return ["--debug"] * (len(others) < end) + others + arguments[end:]


app = typer.Typer(
    name="shardwise",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(plan)
app.command()(models)
app.command()(devices)
app.command()(calibrate)
app.command()(tokens)
app.command()(doctor)
app.command()(explain)
app.command()(export)
app.command(name="import")(import_)
app.command()(profile)
app.command()(train)
app.command()(bench)
app.command()(report)
app.command()(autopsy)
app.add_typer(checkpoint, name="checkpoint")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"shardwise {__version__}")
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
    """Run a command; its exit code is 0, 2 for a user's mistake, 130 for an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(arguments)
    except ShardwiseError as error:
        if _debug_first(arguments)[:1] == ["--debug"]:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
