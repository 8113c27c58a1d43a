"""Triton's model repository: loading and unloading a served model's weights, and the index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec
from msgspec import Meta

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire import bodies

Name = Annotated[str, Meta(min_length=1, description="a folder's name")]


class LoadParameters(msgspec.Struct, forbid_unknown_fields=True):
    """The checkpoint, as `model` or in Triton's model config as `config`, which is JSON in a string."""

    model: Name | None = None
    config: Annotated[Name | None, Meta(extra_json_schema={"contentMediaType": "application/json"})] = None


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The checkpoint to load; without parameters the same again."""

    example: ClassVar[str] = '{"parameters": {"model": "FOLDER"}}'
    parameters: Annotated[
        dict[str, Any] | None, Meta(extra_json_schema={"$ref": "#/components/schemas/LoadParameters"})
    ] = None


class UnloadParameters(msgspec.Struct, forbid_unknown_fields=True):
    """No model that can be unloaded has others that depend on it."""

    unload_dependents: Any = None


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    example: ClassVar[str] = '{"parameters": {"unload_dependents": false}}'
    parameters: UnloadParameters | None = None


class IndexBody(msgspec.Struct):
    ready: bool | None = None


class IndexEntry(TypedDict):
    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


class _Value(msgspec.Struct):
    string_value: Name | None = None


class _ConfigParameters(msgspec.Struct):
    model: _Value | None = None


class _Config(msgspec.Struct):
    """Triton's model config; only the checkpoint is read, the rest is the server's own affair."""

    example: ClassVar[str] = '{"parameters": {"model": {"string_value": "FOLDER"}}}'
    parameters: _ConfigParameters | None = None


def wants_only_ready(body: bodies.Octets) -> bool:
    """Whether the body asks for an index of the ready models only; raises InvalidRequest."""
    return bool(body) and bodies.read(body, IndexBody).ready is True


def source(body: bodies.Octets) -> str | None:
    """Returns the checkpoint that the body of a load names, if any; raises InvalidRequest, Unsupported.

    It stands in `parameters.model`, or in the model config of `parameters.config` under
    `parameters.model.string_value`.
    """
    return source_of(bodies.read(body, LoadBody).parameters or {}) if body else None


def source_of(parameters: Mapping[str, Any]) -> str | None:
    """As `source`, of the parameters."""
    if any(name.startswith("file:") for name in parameters):
        raise Unsupported(
            "a model's files are not accepted over the network: put them under the server's model_repository, and "
            "name their folder"
        )
    given = bodies.convert(parameters, LoadParameters, "parameters")
    named = given.model
    if given.config is not None:
        config = bodies.read(given.config.encode(), _Config, "parameters.config").parameters
        configured = config.model.string_value if config and config.model else None
        if named and configured and named != configured:
            raise InvalidRequest(f"two checkpoints are named, {named!r} and {configured!r}; name one")
        named = named or configured
    return named


def check_unload(body: bodies.Octets) -> None:
    """Raises InvalidRequest if the body of an unload asks for something else."""
    if body:
        bodies.read(body, UnloadBody)


def check_unload_of(parameters: Mapping[str, Any]) -> None:
    """As `check_unload`, of the parameters."""
    bodies.convert(parameters, UnloadParameters, "parameters")
