"""`shardwise checkpoint`: inspects and verifies checkpoints, and converts weights to and from other formats."""

import json
from collections.abc import Sized
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from shardwise.base.errors import InvalidData
from shardwise.base.files.object_path import Location, ObjectPath, location
from shardwise.base.vocabulary.printable import printable
from shardwise.doors.cli.help_pages import GroupedOptions

if TYPE_CHECKING:
    from shardwise.state.checkpoint.manifest import Manifest

checkpoint = Typer(help="Inspect, verify, export or import checkpoints.", no_args_is_help=True)

PathArgument = Annotated[
    Any,
    Argument(
        metavar="PATH",
        parser=location,
        help="A checkpoint (step-…), a folder of checkpoints, or a run folder (the newest is used); or s3://BUCKET/FOLDER.",
    ),
]


class Names(StrEnum):
    """The names of tensors in files: ours, or Hugging Face's."""

    plain = "plain"
    hf = "hf"


class Precision(StrEnum):
    """The dtype of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@checkpoint.command(cls=GroupedOptions)
def inspect(
    path: PathArgument,
    tensors: Annotated[bool, Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, Option("--json", help="The manifest as JSON, and nothing else.")] = False,
) -> None:
    """Show what a checkpoint holds, without reading the tensors."""
    from shardwise.state.checkpoint.manifest import read_manifest

    chosen = _chosen(path)
    manifest = read_manifest(chosen)
    if as_json:
        print(json.dumps(json.loads(manifest.to_bytes())["body"], indent=2))
        return
    _print_summary(chosen, manifest)
    if tensors:
        for name, tensor in manifest.tensors.items():
            shape = " × ".join(map(str, tensor.shape)) or "one number"
            dtype = str(tensor.dtype).removeprefix("torch.")
            print(f"  {printable(name)}  {shape}  {dtype}  {_count(list(tensor.boxes()), 'box', 'boxes')}")


@checkpoint.command(cls=GroupedOptions)
def verify(path: PathArgument) -> None:
    """Compare all files of one or more checkpoints with their checksums."""
    from shardwise.base.errors import CheckpointError
    from shardwise.state.checkpoint.folder import checkpoints_in
    from shardwise.state.checkpoint.verify import verify as verify_one

    found = checkpoints_in(_folder(path)) or [_chosen(path)]
    damaged = []
    for one in found:
        try:
            manifest = verify_one(one)
        except CheckpointError as error:
            damaged.append(one.name)
            print(f"{one.name}  damaged  {printable(str(error))}")
        else:
            print(f"{one.name}  good     {_count(manifest.files, 'file')}, {_num_bytes(manifest):,} bytes")
    if damaged:
        raise CheckpointError(f"{len(damaged)} of {len(found)} damaged: {', '.join(damaged)}")


@checkpoint.command(cls=GroupedOptions)
def export(
    path: PathArgument,
    out: Annotated[Path, Option(help="FILE.safetensors, or a folder.")],
    to: Annotated[Names, Option(help="Our names, or Hugging Face's (Llama, GPT-2).")] = Names.plain,
    precision: Annotated[Precision | None, Option(help="Dtype of floating-point tensors (default: as saved).")] = None,
    most_bytes: Annotated[int | None, Option(help="Start another file when one would exceed this.")] = None,
    force: Annotated[bool, Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write the weights as safetensors, one tensor in memory at a time."""
    there = out if out.suffix == ".safetensors" else next(iter(sorted(out.glob("*.safetensors"))), None)
    if there is not None and there.exists() and not force:
        raise InvalidData(f"{there} exists; --force replaces it")

    from shardwise.engine.core.precision import planned_dtype
    from shardwise.state.checkpoint.export import export_weights

    written = export_weights(
        _chosen(path),
        out,
        hugging_face=to is Names.hf,
        dtype=planned_dtype(precision) if precision else None,
        most_file_bytes=most_bytes,
    )
    for file in written:
        print(f"{file}  {file.stat().st_size:,} bytes")


@checkpoint.command("import", cls=GroupedOptions)
def import_(
    sources: Annotated[list[Path], Argument(metavar="FILE", help="safetensors files, all of one model.")],
    out: Annotated[
        Any, Option(parser=location, metavar="PATH", help="A folder of checkpoints; the new one is step 0 in it.")
    ],
    names: Annotated[Names, Option("--from", help="Our names, or Hugging Face's (Llama, GPT-2).")] = Names.plain,
) -> None:
    """Make a checkpoint from weights alone, to start training from."""
    from shardwise.state.checkpoint.export import import_weights
    from shardwise.state.checkpoint.manifest import read_manifest

    made = import_weights(sources, out, hugging_face=names is Names.hf)
    manifest = read_manifest(made)
    print(f"{made}: {len(manifest.tensors)} tensors, {_num_bytes(manifest):,} bytes")


def _chosen(path: Location) -> Location:
    """Return the checkpoint at `path`, or the newest one in it."""
    from shardwise.state.checkpoint.folder import checkpoints_in
    from shardwise.state.checkpoint.manifest import FILE_NAME

    try:
        if (path / FILE_NAME).is_file():
            return path
    except OSError as error:
        raise InvalidData(f"{path}: cannot be read ({error.strerror})") from error
    found = checkpoints_in(_folder(path))
    if not found:
        raise InvalidData(f"{path}: neither a checkpoint nor a run, and holds no checkpoints")
    return found[-1]


def _folder(path: Location) -> Location:
    """Return the folder of checkpoints at `path`: in a run folder, the one that `shardwise train` writes."""
    from shardwise.training.config.config import load_config
    from shardwise.training.run_folder import CHECKPOINTS

    if isinstance(path, ObjectPath):
        return path
    config = path / "config.toml"
    elsewhere = load_config(config).checkpoint.folder if config.is_file() else None
    if elsewhere is not None:
        return location(elsewhere)
    within = path / CHECKPOINTS
    return within if within.is_dir() else path


def _num_bytes(manifest: "Manifest") -> int:
    return sum(file.num_bytes for file in manifest.files.values())


def _count(items: Sized, one: str, many: str = "") -> str:
    """Return the number of items with its noun: `1 file`, `2 files`."""
    return f"{len(items)} {one if len(items) == 1 else many or one + 's'}"


def _print_summary(path: Location, manifest: "Manifest") -> None:
    from math import prod

    contents = manifest.contents
    num_parameters = sum(prod(shape) for shape, _ in contents.parameters.values())
    plan = contents.plan
    mesh = f", mesh {plan['mesh']['replicate']}×{plan['mesh']['shard']}" if plan and "mesh" in plan else ""
    optimizer = contents.optimizer
    print(path)
    print(f"  step        {contents.step:,}")
    ranks = _count(range(contents.num_ranks), "rank")
    print(f"  saved by    {ranks}, {printable(plan['strategy']) + mesh if plan else 'no plan'}")
    print(f"  parameters  {num_parameters:,} in {len(contents.parameters)} tensors; {len(contents.buffers)} buffers")
    print(f"  optimizer   {printable(optimizer['kind']) if optimizer else 'none: weights only'}")
    print(f"  progress    {printable(', '.join(contents.progress)) or 'none'}")
    print(f"  on disk     {_num_bytes(manifest):,} bytes in {_count(manifest.files, 'file')}")
