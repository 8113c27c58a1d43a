"""A server's description of itself, the same over every transport."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

from guerdon.server.service import Service
from guerdon.wire.forms.triton_repository import IndexEntry
from guerdon.wire.signature import MODEL_VERSION, ServerMetadata, Statistics

try:
    _VERSION = metadata.version("guerdon")
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    _VERSION = "0"


def is_ready(service: Service, name: str | None = None) -> bool:
    """Whether the model or operation of that name can be asked; None for all that are loaded."""
    critic = service.critic
    if not service.ready:
        return False
    if (
        critic is not None
        and critic.fault is not None
        and name in (None, critic.scorer_name, *service.catalog.operations)
    ):
        return False
    return name is None or service.catalog.is_loaded(name)


def why_not_ready(service: Service) -> str:
    """Returns why the server as a whole is not ready, "" if it is."""
    error = service.loss or (None if service.critic is None else service.critic.fault)
    if error is not None:
        return str(error)
    return "" if service.ready else "it is starting or stopping"


def server() -> ServerMetadata:
    """Returns KServe v2's server metadata."""
    return {
        "name": "guerdon",
        "version": _VERSION,
        "extensions": ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
    }


def repository_index(service: Service, only_ready: bool) -> list[IndexEntry]:
    """Returns every model with its version and state."""
    index: list[IndexEntry] = []
    for info in service.catalog.models():
        can_be_asked = is_ready(service, info.name)
        if can_be_asked or not only_ready:
            state: Literal["READY", "UNAVAILABLE"] = "READY" if can_be_asked else "UNAVAILABLE"
            entry = service.catalog.entries.get(info.name)
            reason = "" if service.catalog.is_loaded(info.name) else "asleep" if entry and entry.sleep else "unloaded"
            index.append({"name": info.name, "version": MODEL_VERSION, "state": state, "reason": reason})
    return index


def statistics(service: Service, name: str, version: str) -> Statistics:
    """Returns Triton's statistics of the named model, or of all if the name is empty; raises UnknownModel."""
    infos = [service.catalog.model(name, version)] if name else service.catalog.models()
    return {"model_stats": service.triton.statistics([info.name for info in infos])}
