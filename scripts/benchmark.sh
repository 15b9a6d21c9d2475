#!/usr/bin/env bash
# DDP, then FSDP, on two GPUs: memory per GPU, throughput, memory savings.
#
#   bash scripts/benchmark.sh
#   MODEL_SIZE=large BATCH_SIZE=32 EPOCHS=1 bash scripts/benchmark.sh
#
# From the environment: MODEL_SIZE (base), BATCH_SIZE (32, per process), EPOCHS (3), MAX_STEPS (no limit),
# DATASET (random images of 224 pixels), PYTHON (python). Without two GPUs it says what it does instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_SIZE=${MODEL_SIZE:-base}
BATCH_SIZE=${BATCH_SIZE:-32}
EPOCHS=${EPOCHS:-3}
MAX_STEPS=${MAX_STEPS:-}
PYTHON=${PYTHON:-python}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
num_gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')

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
elif ((num_gpus == 0)); then
  DATASET=${DATASET:-digits}
  MAX_STEPS=${MAX_STEPS:-6}
  NUM_WORKERS=0
  echo "No GPU: DDP runs on 2 CPU processes (Gloo, $DATASET, at most $MAX_STEPS steps); FSDP needs GPUs (docs/accelerate.md)."
  export ACCELERATE_USE_CPU=true GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  train ddp "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2
else
  DATASET=${DATASET:-random}
  NUM_WORKERS=4
  for name in ddp fsdp; do
    train "$name" "$PYTHON" -m accelerate.commands.launch --config_file "accelerate/config_$name.yaml"
  done
fi

"$PYTHON" - "$results" <<'TABLE'
"""Prints the table; fails where nothing was measured."""
import json
import sys
from pathlib import Path

found = {path.stem: json.loads(path.read_text()) for path in Path(sys.argv[1]).glob("*.json")}
peaks = {name: max(rank["peak_allocated_bytes"] or 0 for rank in run["ranks"]) for name, run in found.items()}
print(f"\n{'':6} {'memory per GPU':>22} {'samples/s':>14} {'memory savings':>16}")
for name in ("ddp", "fsdp"):
    peak = peaks.get(name, 0)
    memory = f"{peak / 2**30:.2f} GiB" if peak else "not measured"
    speed = found[name]["samples_per_s"] if name in found else None
    saving = f"{1 - peak / peaks['ddp']:.0%}" if name == "fsdp" and peak and peaks.get("ddp") else "–"
    print(f"{name:6} {memory:>22} {f'{speed:.1f}' if speed else 'not measured':>14} {saving:>16}")
sys.exit(not found)
TABLE
