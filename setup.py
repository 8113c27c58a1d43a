"""Makes the package's page of the README: there, links and pictures of the repository lead nowhere by themselves.

All else stands in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = ""
"""The URL at which the repository is public, such as https://github.com/NAME/guerdon; empty as long as it is not."""

_PICTURE = re.compile(r'!\[([^\]]*)\]\(([^)]+)\)|<img src="([^"]+)"[^>]* alt="([^"]*)">')
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#]*)(#[^)]*)?\)")


def page(readme: str, repository: str) -> str:
    """Returns the README with links to the public repository; without one they name the file, as text."""

    def picture(found: re.Match[str]) -> str:
        text, path = found[1] or found[4], found[2] or found[3]
        return f"![{text}]({repository}/raw/HEAD/{path})" if repository else f"*{text}*"

    def link(found: re.Match[str]) -> str:
        text, path, heading = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", path):
            return found[0]
        if not path:  # a heading of the README, which the package's page has without an anchor
            return f"[{text}]({repository}{heading})" if repository else text
        if repository:
            return f"[{text}]({repository}/blob/HEAD/{path}{heading})"
        return text if text == path else f"{text} (`{path}`)"

    return _LINK.sub(link, _PICTURE.sub(picture, readme))


def urls(repository: str) -> dict[str, str]:
    """Returns the package's links; none without a public repository, because no address is invented."""
    paths = {
        "Repository": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + path for name, path in paths.items()} if repository else {}


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=page(readme, REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=urls(REPOSITORY),
    )
