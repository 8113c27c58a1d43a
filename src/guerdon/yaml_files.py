"""Settings' files: YAML in which a key stands once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from guerdon.errors import ConfigError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Raises ConstructorError for a second key of the same name, which the loader would take in silence."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    "in a mapping", node.start_mark, f"{key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """The parsed content of a YAML file; raises ConfigError where it is missing, malformed, or has a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.load(text, _Loader) or {}  # a SafeLoader  # nosec B506
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", "check its path") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {e}", "correct it at that line") from e
