"""How guerdon and its extras are installed: the one place that says where from."""

from __future__ import annotations

_COMMAND = "pip install '.{extra}' in a clone of guerdon"
"""guerdon is on no package index yet. The day that it is, this becomes "pip install 'guerdon{extra}'"."""


def install_command(extra: str = "") -> str:
    """Returns what to type for guerdon, with the extra of that name in pyproject.toml."""
    return _COMMAND.format(extra=f"[{extra}]" if extra else "")
