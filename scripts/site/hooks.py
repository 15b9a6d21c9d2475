"""What mkdocs cannot do by itself: pages whose text lies elsewhere, and links that leave docs/.

README.md is the home page. A file of the repository that a page links to (code, results) becomes a part of the site, so
that every link is checked and works without the repository. The reference is made from the code (reference.py).
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from reference import command_line_page, config_page, python_page

ROOT = Path(__file__).parents[2]
# Markdown outside of docs/ → its page.
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
# A source file → the page that is made of it.
MADE_OF = {"src/shardwise/__init__.py": "reference/python.md"}
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")
_PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<path>images/[\w-]+\.svg)" ?/?>')
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """All pages that are not in docs/."""
    for source, uri in MOVED.items():
        files.append(File.generated(config, uri, content=linked((ROOT / source).read_text(), folder="", uri=uri)))
    files.append(File.generated(config, "reference/python.md", content=python_page()))
    files.append(File.generated(config, "reference/command-line.md", content=command_line_page()))
    files.append(File.generated(config, "reference/config.md", content=config_page()))
    for path in outside_paths():
        if path.suffix == ".json":
            files.append(File.generated(config, site_uri(path), abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, site_uri(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ lead to the page of what they name. How-to pages come first in a search."""
    page.meta.setdefault("search", {})["boost"] = search_boost(page)
    in_docs = (ROOT / "docs" / page.file.src_uri).is_file()
    return linked(markdown, folder="docs", uri=page.file.src_uri) if in_docs else markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pictures become a part of the page, so that their colours follow its light or dark scheme."""

    def inlined(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / match["path"]).read_text()
        return svg[svg.index("<svg") :]

    return _PICTURE.sub(inlined, html)


def search_boost(page: Page) -> float:
    """Return how much a page counts in a search: less if it answers one question, little if it is no guide."""
    sections = [ancestor.title for ancestor in page.ancestors]
    if "Questions" in sections:
        return 0.4
    return 0.05 if "Measurements" in sections or "Reference" in sections else 1.0


def linked(markdown: str, *, folder: str, uri: str) -> str:
    """Text that was written for a file in `folder` of the repository, as a page at `uri` of the site."""

    def replaced(match: re.Match[str]) -> str:
        path = Path(normpath(f"{folder}/{match['path']}")) if folder else Path(match["path"])
        if not (ROOT / path).exists():
            return match[0]
        return relpath(site_uri(path), Path(uri).parent.as_posix())

    return _LINK.sub(replaced, markdown)


def site_uri(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    if path.as_posix() in MOVED | MADE_OF:
        return (MOVED | MADE_OF)[path.as_posix()]
    if (ROOT / path).is_dir():
        return f"source/{path.as_posix()}/index.md"
    return f"source/{path.as_posix()}" + ("" if path.suffix == ".json" else ".md")


def outside_paths() -> list[Path]:
    """Files and folders of the repository that a page links to and that are no pages themselves."""
    found: set[Path] = set()
    documents = [*(Path(name) for name in MOVED), *(p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md"))]
    for document in documents:
        for match in _LINK.finditer((ROOT / document).read_text()):
            path = Path(normpath((document.parent / match["path"]).as_posix()))
            is_page = path.as_posix() in MOVED | MADE_OF
            if path.parts[0] in ("docs", "..") or is_page or not (ROOT / path).exists():
                continue
            found.add(path)
            if (ROOT / path).is_dir():
                found.update(sorted(p.relative_to(ROOT) for p in (ROOT / path).glob("*.py")))
    return sorted(found)


def source_page(path: Path) -> str:
    return "\n".join(_source_lines(path))


def _source_lines(path: Path) -> Iterator[str]:
    """A file as it is, or what is in a folder."""
    # Nobody searches the documentation for code.
    yield from ("---", "search: {exclude: true}", "hide: [navigation, toc]", "---", "", f"# {path.name}", "")
    yield f"`{path.as_posix()}`"
    yield ""
    if (ROOT / path).is_dir():
        yield from (f"- [{file.name}]({file.name}.md)" for file in sorted((ROOT / path).glob("*.py")))
        return
    # No file has as long a line of tildes.
    yield from (f"~~~~~~~~{_LANGUAGES.get(path.suffix, 'text')}", (ROOT / path).read_text().rstrip(), "~~~~~~~~")


def on_config(config: MkDocsConfig) -> Any:
    """A change of what the pages are made of builds them again (`mkdocs serve`)."""
    config.watch.extend(str(ROOT / name) for name in (*MOVED, "src", "scripts/site"))
    return config
