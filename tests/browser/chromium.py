"""A Chromium that the page is looked at with: where it is, and how it is started."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The one that CHROMIUM names, else one of NAMES that is installed, else playwright's own, else None."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named) or named
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is not None:
        return found
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@contextmanager
def launched(executable: str) -> Iterator[Any]:
    """A headless browser of that executable."""
    from playwright.sync_api import sync_playwright

    # As root, as in a container, Chromium starts only without its sandbox; what it shows is our own page.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
