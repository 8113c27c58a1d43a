"""What an admin asks of a model's place: which checkpoint to load into it, in the form of Triton's repository."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire import bodies

_EXAMPLE = '{"parameters": {"model": "FOLDER"}}'
_UNLOADS = '{"parameters": {"unload_dependents": false}}'


def source(body: bytes) -> str | None:
    """The checkpoint that the body of a load names, None where it names none; raises InvalidRequest, Unsupported.

    It stands in `parameters.model`, or in the model config of `parameters.config`, which is JSON in a string, under
    `parameters.model.string_value`.
    """
    if not body:
        return None
    return source_of(_parameters(body, _EXAMPLE))


def check_unload(body: bytes) -> None:
    """Raises InvalidRequest where the body of an unload asks for what is not done."""
    if body:
        check_unload_of(_parameters(body, _UNLOADS))


def check_unload_of(parameters: Mapping[str, Any]) -> None:
    """The same, of the request's parameters. No model that can be unloaded has others that depend on it."""
    for name in parameters:
        if name != "unload_dependents":
            raise InvalidRequest(f"the parameter {name!r} is unknown; send nothing, or {_UNLOADS}")


def source_of(parameters: Mapping[str, Any]) -> str | None:
    """The same, of the request's parameters: plain values, or the protobuf's ModelRepositoryParameter."""
    given = {name: _plain(value) for name, value in parameters.items()}
    for name in given:
        if name.startswith("file:"):
            raise Unsupported(
                "a model's files are not taken over the network: put them under the server's model_repository, and "
                "name their folder"
            )
        if name not in ("model", "config"):
            raise InvalidRequest(f"the parameter {name!r} is unknown; send {_EXAMPLE}")
    named = [_text(given["model"], "model")] if given.get("model") is not None else []
    if given.get("config") is not None and (inner := _of_config(given["config"])) is not None:
        named.append(inner)
    if len(set(named)) > 1:
        raise InvalidRequest(f"two checkpoints are named, {named[0]!r} and {named[1]!r}; name one")
    return named[0] if named else None


def _parameters(body: bytes, example: str) -> dict[str, Any]:
    """What stands under `parameters`, and nothing beside it."""
    asked = bodies.object_of(bodies.parse(body), example)
    if unknown := next((name for name in asked if name != "parameters"), None):
        raise InvalidRequest(f"{unknown!r} is unknown; send {example}")
    return {} if asked.get("parameters") is None else bodies.object_of(asked["parameters"], example)


def _of_config(text: Any) -> str | None:
    """What a model config in JSON names; all else in it is the server's own affair."""
    config = bodies.parse(_text(text, "config").encode(), "parameters.config")
    example = '{"parameters": {"model": {"string_value": "FOLDER"}}}'
    value = bodies.object_of(config, example).get("parameters")
    for name in ("model", "string_value"):
        if value is None:
            return None
        value = bodies.object_of(value, example).get(name)
    return None if value is None else _text(value, "parameters.model.string_value of the config")


def _plain(value: Any) -> Any:
    """A parameter as JSON would have it."""
    which = getattr(value, "WhichOneof", None)
    if which is None:
        return value
    chosen = which("parameter_choice")
    return None if chosen is None else getattr(value, chosen)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{what} is {bodies.kind_of(value) if value != '' else 'empty'}; send a folder's name")
    return value
