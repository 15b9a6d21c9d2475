"""Files of other tools that cannot be read are refused in one line, within a moment."""

from pathlib import Path

import pytest

from shardwise.base.errors import InvalidPlan
from shardwise.doors.interchange.recognise import read_setup

_NESTED = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", ["mixed_precision", "fsdp_config"])
def test_values_that_aliases_multiply_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(f"{_NESTED}compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n{key}: *i\n")
    with pytest.raises(InvalidPlan, match=r"stands for more than 100,000 values, by aliases"):
        read_setup(path)


def test_tables_that_aliases_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["distributed_type: FSDP", "a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{" + ", ".join(f"k{i}: *a{n - 1}" for i in range(9)) + "}" for n in range(1, 12)]
    path = tmp_path / "accelerate.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidPlan, match="by aliases"):
        read_setup(path)


def test_a_value_inside_of_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: &own\n  inside: *own\n")
    with pytest.raises(InvalidPlan, match="by aliases"):
        read_setup(path)


@pytest.mark.timeout(20)
def test_merges_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["distributed_type: FSDP", "a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n}\n  <<: [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 12)]
    path = tmp_path / "accelerate.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidPlan, match="by aliases"):
        read_setup(path)
