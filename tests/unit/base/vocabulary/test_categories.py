from importlib.resources import files

from shardwise.base.vocabulary.categories import CATEGORIES, HOST
from shardwise.measure.report.text.plain_table import LETTERS, STYLES


def test_a_category_is_named_once_and_host_memory_is_none() -> None:
    assert len(set(CATEGORIES)) == len(CATEGORIES)
    assert HOST not in CATEGORIES


def test_every_category_has_a_letter_of_its_own_and_a_colour_in_text_and_on_the_page() -> None:
    assert tuple(LETTERS) == tuple(STYLES) == CATEGORIES
    assert len(set(LETTERS.values())) == len(set(STYLES.values())) == len(CATEGORIES)
    style = files("shardwise.measure.report.page").joinpath("page.css").read_text()
    assert all(f".{name}" in style for name in CATEGORIES)
