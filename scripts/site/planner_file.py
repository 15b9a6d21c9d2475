"""The planner page of the site: one file, made by the command's own code and kept in build/ for the next build."""

import hashlib
from pathlib import Path

from shardwise.cli.plan_page import page_text

URI = "planner-page.html"
"""Its place on the site. planner.html is the text about the planner."""

_ROOT = Path(__file__).parents[2]
KEPT = _ROOT / "build" / "planner-page"


def planner_file() -> Path:
    """The page as `shardwise plan --page` writes it now. It is made again only after a change of the package."""
    path = KEPT / f"{sources_hash()}.html"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob("*.html"):
            old.unlink()
        made = path.with_suffix(".part")
        made.write_text(page_text(), encoding="utf-8")
        # A build that was stopped leaves no half of a page behind.
        made.replace(path)
    return path


def sources_hash(package: Path = _ROOT / "src" / "shardwise") -> str:
    """Of all files of the package: code, page scripts, traces and device tables."""
    found = hashlib.sha256()
    for path in sorted(one for one in package.rglob("*") if one.is_file() and one.suffix != ".pyc"):
        found.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
