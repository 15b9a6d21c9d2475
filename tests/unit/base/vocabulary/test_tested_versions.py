"""A torch outside of the tested releases is named in one line, and never refused."""

import pytest

from shardwise.base.vocabulary.tested_versions import TESTED_TORCH, untested_torch


def test_versions_are_in_order_and_have_three_numbers() -> None:
    numbers = [tuple(map(int, version.split("."))) for version in TESTED_TORCH]
    assert numbers == sorted(set(numbers))
    assert {len(version) for version in numbers} == {3}


@pytest.mark.parametrize("version", TESTED_TORCH)
@pytest.mark.parametrize("build", ["", "+cpu", "+cu130", ".post1", "a0+git1234"])
def test_a_tested_version_has_no_line_whatever_its_build(version: str, build: str) -> None:
    assert untested_torch(version + build) == ""


def test_releases_between_tested_ones_and_fixes_of_the_newest_have_no_line() -> None:
    newest = TESTED_TORCH[-1]
    fix = f"{newest.rpartition('.')[0]}.{int(newest.rpartition('.')[2]) + 3}"
    for found in ("2.12.1", fix, ""):
        assert untested_torch(found) == ""


@pytest.mark.parametrize("found", ["2.16.0", "2.16.0.dev20270101+cpu", "2.100+cpu", "3.0.0"])
def test_a_newer_release_has_one_line_with_the_way_out(found: str) -> None:
    line = untested_torch(found)
    assert line.startswith(f"torch {found} is newer than {TESTED_TORCH[-1]}, ")
    assert line.endswith(f"or install torch {TESTED_TORCH[-1]}")
    assert "\n" not in line


@pytest.mark.parametrize("found", ["2.10.1", "2.9", "1.13.1+cu117"])
def test_an_older_release_has_one_line_with_the_way_out(found: str) -> None:
    line = untested_torch(found)
    assert line.startswith(f"torch {found} is older than {TESTED_TORCH[0]}, ")
    assert line.endswith(f"install torch {TESTED_TORCH[-1]}")
