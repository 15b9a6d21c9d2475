"""A rank of test_fuzz_cuda.py: random compositions (tests/fuzz) on a GPU, with units as CUDA graphs."""

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
from compositions import Case, draw_case, with_graphs  # noqa: E402
from drawn_plans import is_narrow  # noqa: E402
from open_faults import why_left_out  # noqa: E402
from outcomes import Outcome, run_cases  # noqa: E402

from shardwise.comm.groups.agreement import exchange  # noqa: E402
from shardwise.engine.graphs import unit_graphs  # noqa: E402


def with_unit_graphs(case: Case) -> Case:
    """Return the case with steps often enough for units to be recorded and replayed."""
    unit_graphs.ENOUGH = (0, 0)
    found = replace(case, late=False)
    return found if found.graphs else with_graphs(found)


def main() -> None:
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
        case = with_unit_graphs(draw_case(seed, num_ranks=NUM_RANKS))
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
