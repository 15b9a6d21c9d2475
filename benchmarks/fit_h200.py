"""The calibration of the H200 that ships with the package, from what was measured on one.

    python benchmarks/fit_h200.py

Measured by `python -m shardwise.hardware.measuring.calibrate --rows benchmarks/results/calibrate_h200.json`, and later
its products in fp8 and its host memory, by the same with `--only fp8` and `--only host_memory`. What `shardwise
calibrate` writes for a user describes a whole device; the package has the device already, and takes the calibration.
"""

import json
from pathlib import Path

from shardwise.hardware.measuring.device_file import device_table, write_table

RESULTS = Path(__file__).parent / "results"
FILES = ("calibrate_h200.json", "calibrate_fp8_h200.json", "calibrate_host_memory_h200.json")
SHIPPED = Path(__file__).parent.parent / "src/shardwise/hardware/calibrated/h200.toml"


def write(path: Path) -> str:
    """Write the calibration; says what it is made of."""
    first, *later = (json.loads((RESULTS / name).read_text()) for name in FILES)
    measured = first
    for more in later:
        measured = {**more, **measured, "rows": [*measured["rows"], *more["rows"]]}
    calibration = device_table(measured)["device"]["calibration"]
    calibration["source"] += f": benchmarks/results/{', '.join(FILES)}"
    write_table({"calibration": calibration}, path, by="python benchmarks/fit_h200.py")
    return f"{len(measured['rows'])} rows"


if __name__ == "__main__":
    print(f"{SHIPPED}: {write(SHIPPED)}")
