"""Documents and sources cite benchmarks, results and modules that are there, and every file of results is cited."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILE = re.compile(r"benchmarks/[\w/]+\.(?:py|json|toml)")
MODULE = re.compile(r"python -m (shardwise[\w.]*)")


def texts() -> dict[Path, str]:
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml", "tests/reliability/page.md")
    sources = (path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".toml"))
    files = (*(ROOT / name for name in names), *(ROOT / "docs").glob("*.md"), *sources)
    return {path: path.read_text() for path in files}


def test_cited_benchmarks_results_and_modules_are_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {cited}"
        for path, text in texts().items()
        for cited, is_there in (
            *((file, (ROOT / file).exists()) for file in FILE.findall(text)),
            *((module, importlib.util.find_spec(module) is not None) for module in MODULE.findall(text)),
        )
        if not is_there
    ]
    assert missing == []


def test_every_file_of_results_is_cited() -> None:
    everything = "\n".join(texts().values())
    assert [path.name for path in sorted(RESULTS.iterdir()) if path.name not in everything] == []
