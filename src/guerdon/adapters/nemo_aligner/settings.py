"""What NeMo-Aligner's settings say of a server, whatever they are written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.client import RetryPolicy
from guerdon.errors import ConfigError

ANSWER_S = 21_600.0
"""How long a call may take, with all its tries; `cfg` may have another `timeout_s`."""

_NEEDED = object()


def setting(cfg: Any, path: str, default: Any = _NEEDED) -> Any:
    """What stands at the dotted path, in mappings or attributes; `default` where it is missing.

    Raises ConfigError where it is missing and there is no default.
    """
    for name in path.split("."):
        is_there = name in cfg if isinstance(cfg, Mapping) else hasattr(cfg, name)
        if not is_there:
            if default is _NEEDED:
                raise ConfigError(f"the server's settings have no {path}", "give what NeMo-Aligner's YAML has there")
            return default
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg


def address(server: Any) -> str:
    """The URL of the server that has an `ip` and a `port`."""
    return f"http://{setting(server, 'ip')}:{setting(server, 'port')}"


def policy(cfg: Any) -> RetryPolicy:
    """Tries until `timeout_s` is over."""
    return RetryPolicy.patient(setting(cfg, "timeout_s", ANSWER_S))
