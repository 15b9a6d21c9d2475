"""Host memory of `from_pretrained` and `save_pretrained` on 2 CPU ranks: `python benchmarks/pretrained_memory.py`.

A Llama of random weights is saved by transformers. Each rank loads it under `fsdp`, and saves it again. Told for each:
the peak of resident memory above what the process held before, and that less the rank's slices, which lie in host
memory only because the device is a CPU. When loading, it must be at most the largest tensor and a tenth of the model.
malloc is told to give memory back at once, so that what is counted is in use. Writes
benchmarks/results/pretrained_memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
RESULT = Path(__file__).parent / "results" / "pretrained_memory.json"


def resident(key: str) -> int:
    """VmRSS, or VmHWM: its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {key}")


def measured(action: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and the peak while it ran, in bytes above what there was."""
    # Sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = action()
    return result, resident("VmHWM") - before


def make(folder: str, *, hidden: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def rank(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    import shardwise
    from shardwise import Plan
    from shardwise.engine.prepared.inventory import held_bytes

    dist.init_process_group("gloo")
    # Libraries that load at the first use.
    shardwise.prepare(torch.nn.Linear(2, 2), None, Plan())
    model, loading = measured(lambda: shardwise.from_pretrained(LlamaForCausalLM, folder, Plan(strategy="fsdp")))
    _, saving = measured(lambda: shardwise.save_pretrained(model, folder + "-again"))
    slices = sum(held_bytes(model).values())
    everyone: list[Any] = [None] * dist.get_world_size()
    found = {"load_peak_bytes": loading, "slices_bytes": slices, "load_extra_bytes": loading - slices}
    dist.all_gather_object(everyone, {**found, "save_extra_bytes": saving})
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(everyone), flush=True)


def run(*command: str) -> Any:
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(ended.stderr[-3000:])
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0].removeprefix("RESULT ")) if lines else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--do", choices=("make", "rank"))
    parser.add_argument("--folder")
    asked = parser.parse_args()
    if asked.do == "make":
        return make(asked.folder, hidden=asked.hidden, layers=asked.layers)
    if asked.do == "rank":
        return rank(asked.folder)
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "model")
        size = ("--hidden", str(asked.hidden), "--layers", str(asked.layers))
        run(__file__, "--do", "make", "--folder", folder, *size)
        model_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        ranks = run(*torchrun, __file__, "--do", "rank", "--folder", folder)
    largest = 32000 * asked.hidden * 4
    bound = largest + model_bytes // 10
    extra = max(found["load_extra_bytes"] for found in ranks)
    result = {
        "command": "python " + " ".join(["benchmarks/pretrained_memory.py", *sys.argv[1:]]),
        "model_bytes": model_bytes,
        "largest_tensor_bytes": largest,
        "ranks": ranks,
        "extra_bytes": extra,
        "bound_bytes": bound,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    sys.exit(0 if extra <= bound else 1)


if __name__ == "__main__":
    main()
