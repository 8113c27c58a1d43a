"""Settings' files: YAML in which a key stands once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from guerdon.errors import ConfigError


class Located(dict[Any, Any]):
    """A mapping of a file; `places` has the file and line of each key."""

    places: Mapping[Any, str] = {}


class _Loader(yaml.SafeLoader):
    path = ""

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


def _located(loader: _Loader, node: Any) -> Iterator[Located]:
    data = Located()
    yield data  # before its content, which may name it again by an anchor
    data.update(loader.construct_mapping(node))
    data.places = {
        loader.construct_object(key): f"{loader.path}, line {key.start_mark.line + 1}" for key, _ in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _located)


def read_yaml(path: str | Path) -> Any:
    """The parsed content of a YAML file; raises ConfigError where it is missing, malformed, or has a key twice."""
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        loader.path = str(path)
        try:
            return loader.get_single_data() or {}
        finally:
            loader.dispose()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", "check its path") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {e}", "correct it at that line") from e
