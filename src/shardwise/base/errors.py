"""The exceptions that Shardwise raises for mistakes that a user can fix.

    ShardwiseError
    ├── InvalidPlan       a plan, placement, mesh or unit policy is not valid
    ├── InvalidCluster    a cluster, device or link is not valid, or cannot be read
    ├── UnknownName       a model, dataset, strategy … is not in its table
    ├── InvalidModel      a module cannot be cut into units, or a Task is not valid
    ├── InvalidJob        environment variables do not say how this process belongs to a job
    ├── InvalidData       a file or dataset is missing, empty, truncated or malformed
    ├── CheckpointError   a checkpoint cannot be written or read, is damaged, or does not fit the model
    │   └── DiskFailed    the disk failed while one was written (full, EIO …): trying again may help
    ├── MissingExtra      an optional package is not installed
    └── TorchChanged      a private name of torch is gone, or has changed (torch_internals/)

The message is one line: the mistake, the numbers, and the way out. The command line prints
`Kind: message` and exits with 2. Any other exception is a bug in Shardwise, and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ShardwiseError(Exception):
    """A mistake that the user can fix; the message says how.

    `peer` is the rank whose failure this error passes on, or that did not come, if it names one.
    """

    peer: int | None = None


class InvalidPlan(ShardwiseError):  # noqa: N818 - reads as the first word of the line that users see
    """A plan, placement, mesh or unit policy is not valid."""


class InvalidCluster(ShardwiseError):  # noqa: N818
    """A cluster, device or link is not valid, or cannot be read."""


class UnknownName(ShardwiseError):  # noqa: N818
    """A name is not in its table."""

    @classmethod
    def of(cls, kind: str, name: str, *, known: Iterable[str], see: str = "") -> "UnknownName":
        """Return the error for `name`, with the nearest known names, or with all of them where they are few."""
        names = list(known)
        near = get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        elif len(names) <= 12:
            hint = f"known: {', '.join(names)}"
        else:
            hint = ""
        way_out = "; ".join(part for part in (hint, see) if part)
        return cls(f"unknown {kind} {name!r}" + (f"; {way_out}" if way_out else ""))


class InvalidModel(ShardwiseError):  # noqa: N818
    """A module cannot be cut into units, or a Task is not valid."""


class InvalidJob(ShardwiseError):  # noqa: N818
    """Environment variables do not say how this process belongs to a job."""


class InvalidData(ShardwiseError):  # noqa: N818
    """A file or dataset is missing, empty, truncated or malformed."""


class CheckpointError(ShardwiseError):
    """A checkpoint cannot be written or read, is damaged, or does not fit the model."""


class DiskFailed(CheckpointError):  # noqa: N818
    """The disk failed while a checkpoint was written: trying again may help."""


class MissingExtra(ShardwiseError):  # noqa: N818
    """An optional package is not installed."""

    @classmethod
    def of(cls, package: str, *, needed_for: str, extra: str | None = None) -> "MissingExtra":
        """Return the error for `package`, which pip installs with `shardwise[extra]`, or by its own name."""
        what = f"'shardwise[{extra}]'" if extra else package
        return cls(f"{needed_for} needs {package}: pip install {what}")


class TorchChanged(ShardwiseError):  # noqa: N818
    """This torch does not have a private name that Shardwise uses, or has another form of it."""
