import ast
from pathlib import Path

import shardwise
from shardwise.base.vocabulary.quantities import (
    GIB,
    KIB,
    MIB,
    TIB,
    byte_unit,
    bytes_text,
    digits,
    digits_in,
    error_text,
    fixed,
    fixed_text,
    scientific,
    second_unit,
    seconds_text,
    significant,
    step_seconds_text,
    table_number,
    table_rate,
    table_unit,
)

SOURCE = Path(shardwise.__file__).parent


def test_digits_are_three_and_all_of_those_before_the_point() -> None:
    values = (0, 0.00123, 0.5, 9.25, 12.34, 123.4, 12345.6)
    assert [digits(value) for value in values] == ["0", "0.00123", "0.50", "9.25", "12.3", "123", "12,346"]


def test_significant_digits_have_no_zeros_at_the_end() -> None:
    assert [significant(value) for value in (8, 0.0138, 2.72, 99.96, 12345.6)] == [
        "8",
        "0.0138",
        "2.72",
        "100",
        "12,346",
    ]
    assert [significant(value, num_digits=4) for value in (79.25, 989.4, 3350)] == ["79.25", "989.4", "3,350"]


def test_bytes_have_the_largest_unit_of_which_there_is_one() -> None:
    assert [bytes_text(size) for size in (0, 1000, 2**20, 141e9)] == ["0 B", "1,000 B", "1.00 MiB", "131 GiB"]
    assert [byte_unit(size) for size in (2**40, 2**30, 2**30 - 1, 2**10)] == [TIB, GIB, MIB, KIB]


def test_a_unit_may_have_to_be_there_more_often_and_be_one_of_some() -> None:
    assert byte_unit(9 * 2**30, at_least=10, among=(KIB, MIB, GIB)) == MIB
    assert byte_unit(3, at_least=10, among=(KIB, MIB)) == KIB
    assert byte_unit(2**50, among=(MIB, GIB)) == GIB


def test_a_table_is_in_gib_only_where_that_leaves_digits() -> None:
    assert table_unit([100, 7 * 2**30]) == MIB
    assert table_unit([100, 8 * 2**30]) == GIB
    assert table_unit([]) == MIB


def test_a_given_unit_has_a_fixed_number_of_places() -> None:
    assert fixed(85e9, unit=GIB) == "79.2"
    assert fixed_text(85e9, unit=GIB) == "79.2 GiB"
    assert fixed_text(2**30, unit=MIB, places=0) == "1024 MiB"


def test_what_is_too_small_for_its_column_is_all_alike() -> None:
    assert [digits_in(size, unit=MIB) for size in (0, 208, 2**20)] == ["0", "< 0.01", "1.00"]


def test_seconds_have_the_largest_unit_of_which_there_is_one() -> None:
    assert [seconds_text(time) for time in (0, 3e-5, 0.0123, 2.5)] == ["0 s", "30.0 µs", "12.3 ms", "2.50 s"]
    assert [second_unit(time).name for time in (1e-9, 1e-3, 1)] == ["µs", "ms", "s"]


def test_the_time_of_a_step_is_in_milliseconds_and_from_ten_seconds_on_in_tenths() -> None:
    assert [step_seconds_text(time) for time in (0.0123, 2.5, 39.743)] == ["0.012", "2.500", "39.7"]


def test_cells_of_tables_keep_to_six_characters() -> None:
    assert [table_number(value) for value in (0, 17.576, 648.93, 1234.5)] == ["0.00", "17.58", "648.9", "1234"]
    assert [table_rate(value) for value in (8, 3782.1, 1.234e6)] == ["8.00", "3,782", "1.23M"]


def test_what_is_far_from_one_has_a_power_of_ten() -> None:
    assert [scientific(value) for value in (0.0, 0.25, 2.4e-7, -1.5e10)] == ["0", "0.25", "2.4 × 10⁻⁷", "-1.5 × 10¹⁰"]


def test_an_error_has_a_sign_and_one_that_rounds_to_nothing_is_not_negative() -> None:
    assert [error_text(error) for error in (0.0004, -0.0004, 0.0123, -0.5)] == ["+0.0%", "+0.0%", "+1.2%", "-50.0%"]
    assert error_text(None) == "not measured"
    assert error_text(None, unknown="?") == "?"


def test_no_other_file_spells_the_units_of_what_it_prints() -> None:
    """A unit's name in a string that is no docstring: a head, a label, a format."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "iB" not in text:
            continue
        tree = ast.parse(text)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        spelled = [n.value for n in texts if id(n) not in docs and any(f"{sign}iB" in n.value for sign in "KMGT")]
        assert not spelled or path.name == "quantities.py", f"{path.relative_to(SOURCE)}: {spelled}"
