"""`shardwise plan --serve` and `--page`: the planner page, from a server on this machine or as one file."""

from pathlib import Path
from typing import Any

from shardwise.cli.terminal import write_output
from shardwise.errors import InvalidPlan
from shardwise.hardware import cluster_of
from shardwise.interchange.exported import JobShape
from shardwise.interchange.targets import TARGETS
from shardwise.interchange.targets import export as exported_for
from shardwise.models.catalogue import CATALOGUE
from shardwise.plan import Plan
from shardwise.report.planner_page.device_tables import offered_devices
from shardwise.report.planner_page.page_plans import DEVICE_COUNTS, PER_NODE
from shardwise.report.planner_page.planner_document import STATIC_MODELS, catalogue_models, planner_page
from shardwise.report.planner_page.planner_server import HOST, PlannerService, planner_server
from shardwise.sources import Source

_MODEL, _CLUSTER = "llama-3.1-8b", "8xh100-80gb"


def write_page(path: Path, *, model: str | None, cluster: str | None) -> None:
    """Write the page as one file that opens with this model and cluster."""
    if model is not None and model not in CATALOGUE:
        raise InvalidPlan(f"--page {path}: holds models of the catalogue only, and {model} is none; use --serve")
    write_output(path, page_text(model=model, cluster=cluster).encode())


def page_text(*, model: str | None = None, cluster: str | None = None) -> str:
    start = _start(model, cluster)
    names = [*STATIC_MODELS, *([start["model"]] if start["model"] not in STATIC_MODELS else [])]
    return planner_page(catalogue_models(names), start=start, server=None)


def serve_page(*, model: str | None, cluster: str | None, seq: int | None, image: int | None, port: int) -> None:
    """Serve the page until Ctrl+C. `seq` and `image` are for a model that has to be traced."""
    start = _start(model, cluster)
    own = Source(model, seq=seq, image=image) if model is not None and model not in CATALOGUE else None
    service = PlannerService(start=start, own=own, targets=list(TARGETS), exports=_exports)
    with planner_server(service, port=port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ (Ctrl+C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _start(model: str | None, cluster: str | None) -> dict[str, Any]:
    """Return the settings that the page opens with."""
    asked = cluster_of(cluster or _CLUSTER)
    if asked.device not in offered_devices():
        names = ", ".join(device.name for device in offered_devices())
        raise InvalidPlan(f"--cluster {asked}: the page has no {asked.device.name}; it has {names}")
    if asked.num_ranks not in DEVICE_COUNTS or (asked.num_nodes > 1 and asked.devices_per_node != PER_NODE):
        raise InvalidPlan(
            f"--cluster {asked}: the page has 1 to {PER_NODE} devices, or 2, 4, 8 … nodes of {PER_NODE}, up to "
            f"{DEVICE_COUNTS[-1]} devices"
        )
    return {"model": model or _MODEL, "device": asked.device.name, "gpus": asked.num_ranks}


def _exports(plan: Plan, num_devices: int, target: str) -> dict[str, Any]:
    nodes = max(1, num_devices // PER_NODE)
    exported = exported_for(plan, JobShape(num_nodes=nodes, ranks_per_node=max(1, num_devices // nodes)), target=target)
    return {"files": dict(exported.files), "left_out": list(exported.left_out)}
