"""What tests that start other Python processes share."""

from __future__ import annotations

import os
from pathlib import Path

import guerdon


def environment() -> dict[str, str]:
    """This process's environment, with the sources on the path whether guerdon is installed or not."""
    return os.environ | {"PYTHONPATH": str(Path(guerdon.__file__).parents[1])}
