"""Output that several commands share: lines and a status line on the terminal, and output files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.base.errors import InvalidData
from shardwise.base.files.atomic import atomic_write
from shardwise.base.vocabulary.printable import printable_lines


def print_line(text: str) -> None:
    """Print a line without markup, colours or escape codes; the terminal wraps it."""
    from rich.console import Console

    Console().print(printable_lines(text), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on standard error if it is a terminal; yields a function that changes its text."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update


def check_output(option: str, path: Path) -> None:
    """Raise an error if no file can be written at `path`, the value of `option`."""
    if path.is_dir():
        raise InvalidData(f"{option} {path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise InvalidData(f"{option} {path}: there is no folder {path.parent}")


def write_output(path: Path, content: bytes) -> None:
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OSError as error:
        raise InvalidData(f"{path}: cannot be written ({error.strerror})") from error
    print(path)
