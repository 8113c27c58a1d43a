"""Reads YAML files of settings: where each key stands, no key twice, and scalars as they are written if wanted.

A module of its own, because clients import the settings' fields and need no YAML.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from guerdon.errors import ConfigError
from guerdon.settings.fields import Located, Text


class _Loader(yaml.SafeLoader):
    path = ""


class _TextLoader(yaml.BaseLoader):
    path = ""


def _construct_located(loader: Any, node: Any) -> Iterator[Located]:
    data = Located()
    yield data  # before its content, which may refer back to it by an anchor
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.value in seen:  # YAML would silently keep the last
            problem = f"{key.value} is given twice"
            raise yaml.constructor.ConstructorError("in a mapping", node.start_mark, problem, key.start_mark)
        seen.add(key.value)
    data.update(loader.construct_mapping(node))
    data.places = {
        loader.construct_object(key): f"{loader.path}, line {key.start_mark.line + 1}" for key, _ in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_located)
_TextLoader.add_constructor("tag:yaml.org,2002:map", _construct_located)
_TextLoader.add_constructor("tag:yaml.org,2002:str", lambda loader, node: Text(loader.construct_scalar(node)))  # type: ignore[arg-type]


def read_yaml(path: str | Path, kind: str = "", *, as_texts: bool = False) -> Any:
    """Returns the parsed content of a YAML file; with `as_texts`, its scalars as they are written.

    Raises ConfigError, which names the file's `kind`, if it is missing, malformed or has a key twice.
    """
    try:
        cls: Any = _TextLoader if as_texts else _Loader
        loader = cls(Path(path).read_text(encoding="utf-8"))
        loader.path = str(path)
        try:
            return loader.get_single_data() or {}
        finally:
            loader.dispose()
    except OSError as e:
        raise ConfigError(f"cannot read {kind}{path}: {e.strerror}", "check its path") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {e}", "correct it at that line") from e
