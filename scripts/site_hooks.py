"""What the site's build does beside MkDocs: files of the repository that a page links to come along, the README first.

Pages link to each other as they lie in the repository, so that every link works there; a file outside docs/ has a
place under `repository/` in the site, and the README is the site's first page. A link to a file that is not there is
left as it is, of which MkDocs warns, and `--strict` fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FIRST = "README.md"
ALONG = "repository/"
ALWAYS = (FIRST, "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
"""Files outside docs/ that are in the site although no page may link to them."""

LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")([^)"#\s]+)')
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where a file of the repository is in the site's sources; both relative, with slashes."""
    if path == FIRST:
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else ALONG + path


def linked(path: str) -> list[str]:
    """The files of the repository that the page `path` links to."""
    text = FENCE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    targets = (os.path.normpath(os.path.join(os.path.dirname(path), target)) for _, target in LINK.findall(text))
    return [target for target in targets if (ROOT / target).is_file()]


def coming_along() -> set[str]:
    """Every file outside docs/ that pages link to, from page to page."""
    found: set[str] = set()
    waiting = [*ALWAYS, *(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += linked(path) if path.endswith(".md") else []
    return {path for path in found if not path.startswith("docs/")}


def on_files(files: Files, config: Any) -> Files:
    """MkDocs asks here for the files of the site."""
    for path in sorted(coming_along()):
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs asks here for a page's text: links lead to where their targets are in the site."""
    path = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def led(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(path), match[2]))
        if not (ROOT / target).is_file():
            return match[0]
        return match[1] + os.path.relpath(place(target), os.path.dirname(place(path)) or ".")

    return LINK.sub(led, markdown)
