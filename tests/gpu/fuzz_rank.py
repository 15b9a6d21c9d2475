"""A rank of test_fuzz_cuda.py: random compositions (tests/fuzz) on a GPU, with steps that are captured and replayed.

With FUZZ_GRAPHS=units it is the units that are captured, in ordinary steps.
"""

import json
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

RANK, NUM_RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
os.environ |= {"NCCL_HOSTID": f"host{RANK}", "NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from compositions import Case, Event, draw_case, with_graphs  # noqa: E402
from drawn_plans import is_narrow  # noqa: E402
from open_faults import why_left_out  # noqa: E402
from outcomes import Outcome, run_cases  # noqa: E402
from python_parts import SETTINGS, WRITING  # noqa: E402

from shardwise.comm.agreement import exchange  # noqa: E402
from shardwise.engine.graphs import unit_graphs  # noqa: E402

# Three ordinary steps, the captured one, and a replay.
_REPEATS = 5


def captured(case: Case) -> Case:
    """Return the case with every step as one call, often enough to be captured and replayed."""
    events: list[Event] = []
    for event in case.events:
        if event.kind in ("set", "hook"):
            # Only attributes and closures are guarded, and a replay runs no hooks.
            continue
        if event.kind != "step":
            events.append(event)
            continue
        kept = {name: value for name, value in event.settings.items() if name in ("passes", "clip")}
        if kept.get("clip") == "value":
            del kept["clip"]
        events += [Event(kind="step", settings={**kept, "by": "shardwise.step"})] * _REPEATS
    # An update on the host rounds differently from one on the device.
    on_host = any(plan.get("offload_states") for plan in case.plans())
    # What is read or written in Python is none of a captured step's.
    kinds = [*SETTINGS, *WRITING]
    parts = tuple(
        replace(part, hooked="nothing", kind="plain" if part.kind in kinds else part.kind) for part in case.parts
    )
    # Late results are delivered by the CPU, which a graph does without.
    return replace(case, parts=parts, events=tuple(events), late=False, double=case.double or on_host)


def captured_units(case: Case) -> Case:
    """Return the case with ordinary steps, often enough for units to be captured and replayed."""
    unit_graphs.ENOUGH = (0, 0)
    events = tuple(
        replace(event, settings={name: value for name, value in event.settings.items() if name != "by"})
        if event.kind == "step" and event.settings.get("by") == "shardwise.step"
        else event
        for event in case.events
    )
    found = replace(case, events=events, late=False)
    return found if found.graphs else with_graphs(found)


def main() -> None:
    prepared = captured_units if os.environ.get("FUZZ_GRAPHS") == "units" else captured
    first, last = (int(part) for part in os.environ["FUZZ_SEEDS"].split(":"))
    limit_seconds = float(os.environ.get("FUZZ_SECONDS", "1e9"))
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    store = dist.FileStore(str(FOLDER / "store"), NUM_RANKS)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=NUM_RANKS, device_id=torch.device("cuda", 0))
    kinds: Counter[str] = Counter()
    failed: dict[int, list[dict[str, object]]] = {}
    refused: Counter[str] = Counter()
    replayed, began = 0, time.monotonic()
    for seed in range(first, last):
        case = prepared(draw_case(seed, num_ranks=NUM_RANKS))
        on_host_in_narrow = case.double and is_narrow(dict(case.plan))
        compiles = any("compile" in plan for plan in case.plans())
        if compiles or on_host_in_narrow or why_left_out(case):
            continue
        # The last line of a rank that ends by a signal.
        print(f"seed {seed}", flush=True)
        try:
            (found,) = run_cases(RANK, [case])
        except Exception as error:
            traceback.print_exc()
            found = Outcome(kind="failed", line=f"{type(error).__name__}: {error}"[:500])
        ranks = exchange(found)
        replayed += found.replayed
        bad = [one for one in ranks if one.kind == "failed"]
        kinds["failed" if bad else found.kind] += 1
        if bad:
            failed[seed] = [asdict(one) for one in bad]
        elif found.kind == "refused":
            refused[found.line.rsplit("): ", 1)[-1][:110]] += 1
        out_of_time = time.monotonic() - began > limit_seconds
        if any(exchange(out_of_time)):
            break
    if RANK == 0:
        said = {"kinds": kinds, "replayed": replayed, "last": seed, "seconds": time.monotonic() - began}
        (FOLDER / "found.json").write_text(json.dumps({**said, "failed": failed, "refused": refused.most_common(12)}))
    dist.destroy_process_group()


main()
