#!/usr/bin/env bash
# DDP, then FSDP, on two GPUs, or on two CPU ranks where there is no GPU: memory per rank, throughput, memory savings.
#
#   bash scripts/benchmark.sh
#   MODEL_SIZE=large BATCH_SIZE=32 EPOCHS=1 bash scripts/benchmark.sh
#
# From the environment: MODEL_SIZE (base), BATCH_SIZE (32, per process), EPOCHS (3), MAX_STEPS (no limit),
# DATASET (random images of 224 pixels), PYTHON (python). Without two GPUs it says what it does instead; without one
# the model, the batch and the data are small (tiny, 8, digits, 12 steps).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EPOCHS=${EPOCHS:-3}
MAX_STEPS=${MAX_STEPS:-}
PYTHON=${PYTHON:-python}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
num_gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if ((num_gpus == 0)); then
  MODEL_SIZE=${MODEL_SIZE:-tiny}
  BATCH_SIZE=${BATCH_SIZE:-8}
  DATASET=${DATASET:-digits}
  MAX_STEPS=${MAX_STEPS:-12}
  NUM_WORKERS=0
else
  MODEL_SIZE=${MODEL_SIZE:-base}
  BATCH_SIZE=${BATCH_SIZE:-32}
  DATASET=${DATASET:-random}
  NUM_WORKERS=4
fi

# train NAME LAUNCHER…: one training; its result goes to $results/NAME.json, a failure ends nothing.
train() {
  local name=$1
  shift
  echo "== $name"
  local options=(--model-size "$MODEL_SIZE" --batch-size "$BATCH_SIZE" --epochs "$EPOCHS")
  options+=(--dataset "$DATASET" --skip-eval --json "$results/$name.json")
  if [[ -n $MAX_STEPS ]]; then
    options+=(--max-steps "$MAX_STEPS")
  fi
  "$@" accelerate/train.py "${options[@]}" --num-workers "$NUM_WORKERS" || echo "$name failed"
}

if ((num_gpus == 1)); then
  echo "One GPU: both ranks share it, for the memory alone (a few steps; EPOCHS is not used, speed is no result)."
  "$PYTHON" benchmarks/accelerate_vit.py --model-size "$MODEL_SIZE" --batch-sizes "$BATCH_SIZE" \
    --cases ddp fsdp_full_shard --out "$results/shared.json" ||
    grep -q '"error": null' "$results/shared.json"
  exit
fi
for name in ddp fsdp; do
  train "$name" "$PYTHON" -m accelerate.commands.launch --main_process_port 0 \
    --config_file "accelerate/config_$name.yaml"
done

"$PYTHON" - "$results" <<'TABLE'
"""Prints the table; fails where nothing was measured."""
import json
import sys
from pathlib import Path

found = {path.stem: json.loads(path.read_text()) for path in Path(sys.argv[1]).glob("*.json")}
on_cpu = any(run["ranks"][0]["device"] == "cpu" for run in found.values())
digits, unit_bytes, unit = (0, 2**20, "MiB") if on_cpu else (2, 2**30, "GiB")
peaks = {name: max(rank["peak_allocated_bytes"] or 0 for rank in run["ranks"]) for name, run in found.items()}
print(f"\n{'':6} {'memory per CPU rank' if on_cpu else 'memory per GPU':>22} {'samples/s':>14} {'memory savings':>16}")
for name in ("ddp", "fsdp"):
    peak = peaks.get(name, 0)
    memory = f"{peak / unit_bytes:.{digits}f} {unit}" if peak else "not measured"
    speed = found[name]["samples_per_s"] if name in found else None
    saving = f"{1 - peak / peaks['ddp']:.0%}" if name == "fsdp" and peak and peaks.get("ddp") else "–"
    print(f"{name:6} {memory:>22} {f'{speed:.1f}' if speed else 'not measured':>14} {saving:>16}")
if on_cpu:
    print("On CPU ranks: memory is the peak of all tensors, and samples/s is not a speed claim.")
sys.exit(not found)
TABLE
