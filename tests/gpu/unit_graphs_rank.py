"""A rank of test_unit_graphs_cuda.py: loops of all kinds with units as CUDA graphs, and the same loops without."""

import json
import os
import sys
from pathlib import Path

RANK, NUM_RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
os.environ |= {"NCCL_HOSTID": f"host{RANK}", "NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from loops import LOOPS  # noqa: E402
from test_unit_graphs import PLANS, STRATEGIES, difference, run  # noqa: E402


def main() -> None:
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(str(FOLDER / "store"), NUM_RANKS)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=NUM_RANKS, device_id=torch.device("cuda", 0))
    cases = [(loop, {"strategy": strategy}) for loop in sorted(LOOPS) for strategy in STRATEGIES]
    cases += [("plain", plan) for plan in (*PLANS.values(), {"strategy": "fsdp", "compile": "inductor"})]
    cases += [("two_forwards", PLANS["recompute"])]
    found = {}
    for loop, options in cases:
        # During a recording, tiles cannot read the random state that their backward would restore.
        draws = options.get("recompute") != "selective" and "tile" not in options
        model_options = {"dropout": 0.1 if draws else 0.0}
        without = run(RANK, loop, {**options, "capture": "off"}, model_options)
        graphed = run(RANK, loop, options, model_options)
        found[f"{loop} {options}"] = [difference(without, graphed), *graphed[2]]
        print(loop, options, found[f"{loop} {options}"], flush=True)
    (FOLDER / f"found{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
