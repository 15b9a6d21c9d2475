"""Uses a wheel in empty environments, one per Python: `python scripts/try_wheel.py dist/*.whl`.

In each: pip installs the wheel with what it requires, `shardwise plan` recommends a plan, and a small model is trained
on two CPU ranks. Ends with exit code 1 if a step fails, or if a Python that was asked for is not there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
CONFIG = """
[task]
model = "gpt-tiny"
dataset = "stdlib"
seq = 16
[plan]
strategy = "fsdp"
micro_batch = 2
[train]
steps = 3
eval_every = 0
[run]
device = "cpu"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="versions, such as 3.12")
    parser.add_argument("--constraints", type=Path, help="versions of what the wheel requires, for pip")
    options = parser.parse_args()
    outcomes = {version: outcome(version, options=options) for version in options.pythons}
    for version, said in outcomes.items():
        print(f"Python {version}: {said}", flush=True)
    return 0 if all(said.startswith("works") for said in outcomes.values()) else 1


def outcome(version: str, *, options: argparse.Namespace) -> str:
    python = interpreter(version)
    if python is None:
        return "not found: install it, or leave it out with --pythons"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            versions = use(python, wheel=options.wheel.resolve(), folder=Path(folder), constraints=options.constraints)
        except subprocess.CalledProcessError as error:
            return f"fails in {' '.join(map(str, error.cmd[1:4]))}: {(error.stderr or '').strip()[-500:]}"
    return f"works ({versions}; {time.monotonic() - began:.0f} s)"


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version: on the path, or one of pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(root.glob(f"{version}.*/bin/python")))]
    for name in filter(None, found):
        # A shim of pyenv may be on the path for a version that is not chosen.
        done = subprocess.run(
            [name, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.startswith(f"{version}."):
            return name
    return None


def use(python: str, *, wheel: Path, folder: Path, constraints: Path | None) -> str:
    """Install and use the wheel in a new environment; return what was installed."""
    home, work = folder / "environment", folder / "work"
    work.mkdir()
    output(python, "-m", "venv", str(home), folder=work)
    limits = [] if constraints is None else ["-c", str(constraints.resolve())]
    own = str(home / "bin" / "python")
    output(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *limits, str(wheel), folder=work)
    return plan_and_train(home / "bin", folder=work)


def plan_and_train(commands: Path, *, folder: Path) -> str:
    """Plan, and train on two ranks, with the commands of an environment, in this folder; return what it has."""
    (folder / "tiny.toml").write_text(CONFIG)
    python, shardwise = str(commands / "python"), str(commands / "shardwise")
    place = output(python, "-c", "import shardwise; print(shardwise.__file__)", folder=folder)
    assert str(commands.parent) in place, place
    planned = output(shardwise, "plan", "gpt2-124m", "--cluster", "8xh100-80gb", folder=folder)
    assert "Recommended" in planned, planned
    trained = output(shardwise, "train", "tiny.toml", "--ranks", "2", folder=folder)
    assert "fsdp on 2 × cpu, fp32: 3 steps" in trained, trained
    inspected = output(shardwise, "doctor", "runs/tiny", folder=folder)
    assert "a run of gpt-tiny under fsdp: metrics of 3 steps" in inspected, inspected
    torch = output(python, "-c", "import torch; print(torch.__version__)", folder=folder).strip()
    return f"{output(shardwise, '--version', folder=folder).strip()}, torch {torch}"


def output(*command: str, folder: Path) -> str:
    """Return what a command prints; without the caller's Python path, which may lead to another Shardwise."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
