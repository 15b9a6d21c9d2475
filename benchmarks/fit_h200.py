"""The calibration of the H200 that ships with the package, from what was measured on one.

    python benchmarks/fit_h200.py

Measured by `python -m shardwise.hardware.calibrate --rows benchmarks/results/calibrate_h200.json`, and its products in
fp8 by the same with `--only fp8` and calibrate_fp8_h200.json. What `shardwise calibrate` writes for a user describes a
whole device; the package has the device already, and takes the calibration.
"""

import json
from pathlib import Path

from shardwise.hardware.device_file import device_table, write_table

ROWS = Path(__file__).parent / "results" / "calibrate_h200.json"
# Rows that were measured later; there may be none.
MORE = Path(__file__).parent / "results" / "calibrate_fp8_h200.json"
SHIPPED = Path(__file__).parent.parent / "src/shardwise/hardware/calibrated/h200.toml"


def write(path: Path) -> str:
    """Write the calibration; says what it is made of."""
    measured = json.loads(ROWS.read_text())
    if MORE.exists():
        measured["rows"] += json.loads(MORE.read_text())["rows"]
    calibration = device_table(measured)["device"]["calibration"]
    files = [ROWS.name, *([MORE.name] if MORE.exists() else [])]
    calibration["source"] += f": benchmarks/results/{' and '.join(files)}"
    write_table({"calibration": calibration}, path, by="python benchmarks/fit_h200.py")
    return f"{len(measured['rows'])} rows"


if __name__ == "__main__":
    print(f"{SHIPPED}: {write(SHIPPED)}")
