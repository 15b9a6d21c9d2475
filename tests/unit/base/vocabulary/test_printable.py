import pytest

from shardwise.base.vocabulary.printable import printable, printable_lines


@pytest.mark.parametrize("sign", ["\x1b", "\x07", "\r", "\x9b", "\u202e", "\u2028", "\x00", "\udcff"])
def test_what_a_terminal_would_obey_or_not_encode_becomes_a_question_mark(sign: str) -> None:
    assert printable(f"a{sign}[31m") == printable_lines(f"a{sign}[31m") == "a?[31m"


def test_other_text_stays_and_lines_stay_lines() -> None:
    text = "1×4 → 3.2\u00a0GiB, größer 数"
    assert printable(text) == text
    assert printable("a\nb\tc") == "a?b?c"
    assert printable_lines("a\nb\tc") == "a\nb\tc"
