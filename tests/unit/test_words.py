"""Documents, help and reports use the field's words; the glossary defines those that are ours."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Pages that a command writes have their own words for outcomes.
GENERATED = {"reliability.md", "scenarios.md", "compatibility.md", "claims.md"}
REPLACED = {
    r"\brehears\w*(?!_)": "single-rank simulation; a trial before training",
    r"\brefused\b": "raises an error",
    r"kernels of an H200": "extrapolated from an H200",
    r"\bit may fit\b": "borderline",
    r"[Ff]irst step after": "time to first step",
    r"curves lie on each other": "coincide",
    r"How right it is": "Accuracy",
    r"needs nothing of ours": "needs no adapter",
    r"told in a warning": "with a warning",
}


def documents() -> list[Path]:
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED]
    return [ROOT / "README.md", *pages]


def shown_texts() -> list[Path]:
    source = ROOT / "src" / "shardwise"
    found = [path for room in ("doors/cli", "measure/report") for path in sorted((source / room).rglob("*.py"))]
    assert len(found) > 50
    return found


@pytest.mark.parametrize("words", REPLACED)
def test_replaced_words_are_in_no_document(words: str) -> None:
    # Names of files and commands stay as they are.
    texts = {page.name: re.sub(r"`[^`]*`|\]\([^)]*\)", "", page.read_text()) for page in documents()}
    assert [name for name, text in texts.items() if re.search(words, text)] == [], f"say: {REPLACED[words]}"


def test_replaced_words_are_in_no_report() -> None:
    for path in shown_texts():
        for words in ("it may fit", "first step after", "lie on each other", "Rehears[a-z]+ [{]"):
            assert not re.search(words, path.read_text()), f"{path.name}: {words}"


def test_the_glossary_is_in_alphabetical_order_and_defines_our_words() -> None:
    rows = re.findall(r"^\| (?!word|-)(.*?) \|", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    words = [re.sub(r"[*`]", "", row).lower() for row in rows]
    assert words == sorted(words)
    for ours in ("plan", "unit", "placement", "step program", "single-rank simulation", "trace of operations", "owned"):
        assert ours in words
