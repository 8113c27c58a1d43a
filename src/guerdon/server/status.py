"""What a server tells about itself, the same over every transport."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from guerdon.server.service import Service
from guerdon.wire import signature


def _version() -> str:
    try:
        return metadata.version("guerdon")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0"


_VERSION = _version()


def server() -> dict[str, Any]:
    """KServe v2's server metadata."""
    return {
        "name": "guerdon",
        "version": _VERSION,
        "extensions": ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
    }


def repository_index(service: Service, only_ready: bool) -> list[dict[str, str]]:
    """Every model with its version and state."""
    index = []
    for info in service.catalog.models():
        is_ready = service.is_ready(info.name)
        if is_ready or not only_ready:
            state = "READY" if is_ready else "UNAVAILABLE"
            reason = "" if service.catalog.is_loaded(info.name) else "unloaded"
            index.append({"name": info.name, "version": signature.MODEL_VERSION, "state": state, "reason": reason})
    return index


def statistics(service: Service, name: str, version: str) -> dict[str, Any]:
    """Triton's statistics of the named model, or of all if the name is empty; raises UnknownModel."""
    infos = [service.catalog.model(name, version)] if name else service.catalog.models()
    return {"model_stats": service.triton.statistics([info.name for info in infos])}
