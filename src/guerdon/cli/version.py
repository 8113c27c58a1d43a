"""`guerdon --version`: of guerdon, and of what decides how it runs."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from typing import Any

from guerdon import __version__


def versions() -> str:
    """One line each: guerdon, Python, torch. Nothing is imported for it."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"guerdon {__version__}\npython {platform.python_version()}\ntorch {torch}\n"


class ShowVersions(argparse.Action):
    """Prints them and ends, when it is come upon."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Ends the command."""
        sys.stdout.write(versions())
        parser.exit()
