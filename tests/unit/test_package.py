import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import shardwise
from shardwise.base.vocabulary.lazy_names import lazy_names
from shardwise.base.vocabulary.tested_versions import TESTED_TORCH

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_and_at_home() -> None:
    assert len(shardwise.__all__) > 30
    assert shardwise.__all__ == sorted(lazy_names(shardwise.__file__))
    for name, home in lazy_names(shardwise.__file__).items():
        value = getattr(shardwise, name)
        assert value is getattr(importlib.import_module(home), name)
        assert name in dir(shardwise)
        assert name == "STRATEGIES" or inspect.getdoc(value)


def test_a_star_import_brings_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from shardwise import *", names)
    assert set(shardwise.__all__) <= names.keys()


def test_what_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prepear'"):
        _ = shardwise.prepear


def test_the_package_is_typed() -> None:
    assert (Path(shardwise.__file__).parent / "py.typed").exists()


def test_documents_and_requirements_state_the_torch_versions_that_were_tested() -> None:
    oldest = ".".join(TESTED_TORCH[0].split(".")[:2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line for line in project["dependencies"] if line.startswith("torch")] == [f"torch>={oldest}"]
    asked = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    assert [line for line in asked if line.startswith("torch")] == [f"torch>={oldest}"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line.removeprefix("torch==") in TESTED_TORCH]
    versions = ", ".join(TESTED_TORCH[:-1]) + f" and {TESTED_TORCH[-1]}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"It needs torch {oldest} or newer. The test suite was run on torch {versions} ([the list]" in readme


def test_the_reading_order_of_the_readme_names_six_files_that_exist_and_are_short() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Read the code in this order")[1].split("\n## ")[0]
    files = re.findall(r"^\d\. \[?`([^`]+)`", section, flags=re.MULTILINE)
    assert len(files) == 6
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [file for file in files if len((ROOT / file).read_text().splitlines()) >= 300] == []


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
            if not link.startswith(("http://", "https://")):
                assert (document.parent / link).exists(), f"{document.name} links to {link}"
