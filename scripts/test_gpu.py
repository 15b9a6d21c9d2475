"""Runs tests/gpu on this machine's GPU, one file after another, and says what passed, failed and was skipped.

    python scripts/test_gpu.py [--half 1|2] [FILE …]

Each file has a process of its own: a file that fills the device, or leaves graphs behind, does not disturb the next.
torch and the rest come from the Python that runs this, so that nothing is installed over a CUDA build of torch. The
exit status is 1 if a test failed or a file did not run at all.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu"
# Measured on one H200, in seconds: files are dealt to two halves by this. A file that is not here counts as 20.
SECONDS = {
    "test_nccl.py": 144,
    "test_profile.py": 121,
    "test_compiled_units.py": 107,
    "test_bench.py": 75,
    "test_compiled_memory.py": 39,
    "test_train_probe_cuda.py": 32,
    "test_graph_update.py": 31,
    "test_unit_graphs_cuda.py": 150,
    "test_fuzz_cuda.py": 150,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """The outcome of one file. `skipped` holds a test and its reason each; `ran` is False if pytest wrote no report."""

    path: Path
    seconds: float
    ran: bool
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        counts = f"{self.passed:3d} passed {len(self.failed):3d} failed {len(self.skipped):3d} skipped"
        return f"{self.path.name:32} {counts if self.ran else 'did not run':38} {self.seconds:6.1f} s"


def halves(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """The files in two parts that take about equally long: longest first, each to the part with less."""
    parts: tuple[list[Path], list[Path]] = ([], [])
    totals = [0, 0]
    for path in sorted(files, key=lambda path: (-SECONDS.get(path.name, 20), path.name)):
        part = totals.index(min(totals))
        parts[part].append(path)
        totals[part] += SECONDS.get(path.name, 20)
    return sorted(parts[0]), sorted(parts[1])


def run_file(path: Path, *, report: Path) -> FileResult:
    """Run one file in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", str(path)],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    seconds = time.monotonic() - began
    if not report.exists():
        return FileResult(path=path, seconds=seconds, ran=False)
    passed, failed, skipped = 0, [], []
    for case in ElementTree.parse(report).iter("testcase"):
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{path.name}::{case.get('name')}")
        elif reason is not None:
            skipped.append((f"{path.name}::{case.get('name')}", reason.get("message", "")))
        else:
            passed += 1
    return FileResult(path=path, seconds=seconds, ran=True, passed=passed, failed=tuple(failed), skipped=tuple(skipped))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests/gpu on this machine's GPU, one file after another.")
    parser.add_argument("--half", type=int, choices=(1, 2), help="run only one half of the files")
    parser.add_argument("files", nargs="*", type=Path, help="run these instead of all of tests/gpu")
    asked = parser.parse_args()
    files = [path.resolve() for path in asked.files] or sorted(FOLDER.glob("test_*.py"))
    if asked.half:
        files = halves(files)[asked.half - 1]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(files):
            print(f"[{number + 1} of {len(files)}] {path.name}", flush=True)
            results.append(run_file(path, report=Path(folder, f"{number}.xml")))
    print("\n".join(["", *map(str, results)]))
    for name, reason in (pair for result in results for pair in result.skipped):
        print(f"skipped  {name}: {reason}")
    for name in (name for result in results for name in result.failed):
        print(f"FAILED   {name}")
    bad = [result for result in results if not result.ran or result.failed]
    print(f"{sum(result.passed for result in results)} passed in {sum(result.seconds for result in results):.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
