"""A release: the wheel holds the whole package, and works where nothing but the wheel is installed of it."""

import runpy
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool, reason="make setup installs it")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


def test_the_wheel_holds_every_file_of_the_package_and_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("shardwise/")}
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        head = Parser().parsestr(archive.read(metadata).decode())
    source = ROOT / "src"
    files = {str(file.relative_to(source)) for file in (source / "shardwise").rglob("*") if file.is_file()}
    assert inside == {name for name in files if "__pycache__" not in name}
    for key in ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Author"):
        assert head[key], key
    assert head.get_payload().startswith("# Shardwise")
    assert any(line.startswith("torch") for line in head.get_all("Requires-Dist"))
    assert {"accelerate", "hf", "lightning", "trl"} <= set(head.get_all("Provides-Extra"))
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in head.get_all("Classifier")
    assert f"\n## {head['Version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The commands of an environment that has the wheel, and of all else only the libraries that it needs."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched last, and .pth files in it (an editable Shardwise) are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_plan_and_a_training_on_two_ranks_run_from_the_wheel_in_another_folder(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    plan_and_train = runpy.run_path(str(ROOT / "scripts" / "try_wheel.py"))["plan_and_train"]
    assert plan_and_train(installed, folder=folder).startswith("shardwise ")
