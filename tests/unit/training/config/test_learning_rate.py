import pytest

from shardwise.training.config.config_sections import ScheduleSection
from shardwise.training.config.learning_rate import lr_at


def rates(num_steps: int, **options: object) -> list[float]:
    schedule = ScheduleSection(**options)  # type: ignore[arg-type]
    return [lr_at(step, schedule=schedule, lr=8.0, num_steps=num_steps) for step in range(1, num_steps + 1)]


def test_warm_up_reaches_the_rate_in_its_last_step() -> None:
    assert rates(6, name="constant", warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_linear_falls_by_equal_parts_and_never_to_nothing() -> None:
    assert rates(4, name="linear") == [8, 6, 4, 2]
    assert rates(6, name="linear", warmup_steps=2) == [4, 8, 8, 6, 4, 2]


def test_cosine_starts_and_passes_the_middle_where_it_should() -> None:
    values = rates(5, name="cosine", warmup_steps=1)
    assert values == pytest.approx([8, 8, 8 * 0.85355339, 4, 8 * 0.14644661])


def test_what_is_left_at_the_end_is_the_final_ratio() -> None:
    assert rates(4, name="linear", final_ratio=0.5) == [8, 7, 6, 5]
    assert rates(1000, name="cosine", final_ratio=0.25)[-1] == pytest.approx(2, abs=1e-4)
    assert min(rates(1000, name="cosine", final_ratio=0.25)) >= 2


def test_a_warm_up_longer_than_the_run_just_rises() -> None:
    assert rates(3, name="cosine", warmup_steps=8) == [1, 2, 3]
