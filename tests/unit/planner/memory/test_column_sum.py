"""What sums over rows take, compared with what was seen on an H200 in the allocator's own record of a step of ViT-L."""

import pytest

from shardwise.planner.memory.stream_peak import ColumnSum, column_sum_bytes
from shardwise.program.spec.step import Line


def test_the_sum_for_a_bias_of_4096_over_16_images_takes_the_100_mib_that_were_seen() -> None:
    assert column_sum_bytes(16 * 197, 4096) == 100 * 2**20


@pytest.mark.parametrize(("rows", "columns"), [(100, 4096), (1020, 4096), (0, 8), (8, 0), (10**6, 10**7)])
def test_a_sum_that_one_block_can_do_takes_nothing(rows: int, columns: int) -> None:
    assert column_sum_bytes(rows, columns) == 0


def test_it_grows_with_the_rows_until_the_device_is_full_and_then_slowly() -> None:
    sizes = [column_sum_bytes(rows, 1024) for rows in (1024, 2048, 4096)]
    assert sizes[1] == 2 * sizes[0]
    assert sizes[2] == 2 * sizes[1]
    full = column_sum_bytes(100_000, 1024)
    assert column_sum_bytes(200_000, 1024) == full
    assert column_sum_bytes(10**7, 1024) > full


def test_it_is_asked_for_at_a_batch() -> None:
    assert ColumnSum(4096, Line(0, 197)).at(16) == column_sum_bytes(16 * 197, 4096)
