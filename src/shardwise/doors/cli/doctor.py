"""`shardwise doctor`: checks a file, says what it does, and how to fix it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.vocabulary.printable import printable, printable_lines
from shardwise.doors.cli.own_files import describe_own
from shardwise.doors.cli.shared_options import SampleLength
from shardwise.plan import Plan
from shardwise.plan.placement import placement_of

if TYPE_CHECKING:
    from shardwise.doors.interchange.foreign_setup import ForeignSetup


def doctor(
    path: Annotated[
        Path,
        Argument(
            metavar="FILE",
            help="A plan, config, cluster, bench, checkpoint or run; or a file of Accelerate, DeepSpeed, Lightning, "
            "torchtitan or the Trainer.",
        ),
    ],
    model: Annotated[str, Option(help="Also predict for this model (as in `shardwise plan`).")] = "",
    cluster: Annotated[str, Option(help="The cluster to predict for, such as 8xh100-80gb (with --model).")] = "",
    micro_batch: Annotated[
        int | None, Option(min=1, help="Samples per rank per pass, where the file has none.")
    ] = None,
    seq: SampleLength = None,
) -> None:
    """Check a file: what it is, what is wrong, and how to fix it.

    The exit code is 1 if there are findings.
    """
    if bool(model) != bool(cluster):
        raise InvalidPlan("--model and --cluster belong together: a prediction needs both")
    described = describe_own(path)
    if described is not None:
        if model:
            raise InvalidPlan(f"{path}: --model and --cluster are for plans and configs")
        print(f"{printable(f'{path}: {described}')}\nnothing wrong found")
        return
    setup = _setup(path)
    from shardwise.doors.interchange.check_setup import check_setup

    findings = check_setup(setup)
    is_known = not setup.settings.wrong
    if is_known:
        _show(setup, path)
    if model and is_known:
        from shardwise.base.vocabulary.quantities import bytes_text
        from shardwise.doors.interchange.predicted import predict
        from shardwise.hardware.cluster import parse_cluster
        from shardwise.measure.report.text.fp8_table import fp8_lines
        from shardwise.models.reference import Model

        spec_for = Model(model, seq=seq).spec_for
        for line in fp8_lines(spec_for(setup.planned), plan=setup.planned):
            print(line)
        found, more = predict(setup, spec_for, cluster=parse_cluster(cluster), micro_batch=micro_batch)
        findings += more
        time = f", {found.time.samples_per_s:,.0f} samples per second" if found.time is not None else ""
        needs = bytes_text(found.memory.device_bytes)
        print(f"{model} on {cluster}, {found.batch} samples per rank: {needs} per device, fits: {found.fits}{time}")
    for line in setup.left_out:
        print(printable(f"not checked: {line}"))
    for finding in findings:
        print(printable_lines(str(finding)))
    if findings:
        raise Exit(1)
    print("nothing wrong found")


def _setup(path: Path) -> "ForeignSetup":
    """Read a file as a setup; a plan of Shardwise is a setup without settings of another tool."""
    from shardwise.base.files.data_file import read_toml
    from shardwise.doors.interchange.foreign_setup import ForeignSetup
    from shardwise.doors.interchange.from_torchtitan import is_torchtitan
    from shardwise.doors.interchange.recognise import read_setup
    from shardwise.doors.interchange.setting_values import Settings

    if path.suffix != ".toml":
        return read_setup(path)
    try:
        table = read_toml(path)
    except ShardwiseError:
        # Plan.load raises an error that says what is wrong with the file.
        table = {}
    if is_torchtitan(table):
        return read_setup(path)
    if "task" not in table:
        return ForeignSetup(tool="shardwise", plan=Plan.load(path), settings=Settings({}))
    from shardwise.training.config.config import load_config

    return ForeignSetup(tool="shardwise", plan=load_config(path).plan, settings=Settings({}))


def _show(setup: "ForeignSetup", path: Path) -> None:
    from rich.console import Console

    from shardwise.measure.report.text.plain_table import plain_table

    plan = setup.plan
    heads = ("units", "strategy", "params", "grads", "optim")
    table = plain_table(heads, wraps=heads)
    table.add_row("every unit" if not plan.overrides else "every other unit", plan.strategy, *_places(plan.strategy))
    # The last match wins, so the last override comes first.
    for pattern, strategy in reversed(plan.to_dict()["overrides"].items()):
        table.add_row(printable(pattern), strategy, *_places(strategy))
    console = Console()
    console.print(table)
    mesh = f"mesh {plan.mesh}" if plan.mesh else "all ranks on the shard axis"
    kind = "a plan" if setup.tool == "shardwise" else f"a setup of {setup.tool}, as a plan"
    console.print(
        f"{path}: {kind}: {mesh}, precision {plan.precision}, recompute {plan.recompute}, "
        f"units {plan.units}, engine {plan.engine}" + (f", compile {plan.compiler}" if plan.compiler != "none" else ""),
        highlight=False,
        markup=False,
    )


def _places(strategy: str) -> tuple[str, str, str]:
    """Return where params, grads and optimizer state live under a strategy."""
    placement = placement_of(strategy)
    kept = "" if placement.reshard_after_forward else ", kept after forward"
    params = "sharded" + kept if placement.params.is_sharded else "replicated"
    return params, placement.grads.value, placement.optim.value
