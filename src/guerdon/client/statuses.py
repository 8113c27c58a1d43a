"""Maps a server's HTTP or gRPC status to the error that it raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon import errors
from guerdon.errors import GuerdonError

CERTIFICATE_HINT = (
    "; if the server requires client certificates, give the credentials' cert_file and key_file (GUERDON_CERT_FILE, "
    "GUERDON_KEY_FILE)"
)
"""Added if a TLS connection ends before the answer: few servers say why."""


def error_of(
    status: int | str,
    message: str,
    retry_after_s: float | None = None,
    class_name: str | bytes | None = None,
    num_steps: float | None = None,
) -> GuerdonError:
    """Returns the error of the class that the server raised.

    `status` is an HTTP status or the name of a gRPC status. Several classes share one, so `class_name` decides if the
    server sends it. `num_steps` is TrainFailed's.
    """
    if class_name == "TrainFailed":
        return errors.TrainFailed(message, int(num_steps or 0))
    is_full = status == 429 or (status in (503, "RESOURCE_EXHAUSTED") and retry_after_s is not None)
    if class_name == "Overloaded" or is_full:
        return errors.Overloaded(message, retry_after_s or 0.0)
    cls = getattr(errors, class_name, None) if isinstance(class_name, str) else None
    if isinstance(cls, type) and issubclass(cls, GuerdonError) and not issubclass(cls, errors.StartError):
        return cls(message)
    if isinstance(status, int):
        return _BY_HTTP.get(status, errors.InvalidRequest if status < 500 else errors.ServerFault)(message)
    return _BY_GRPC.get(status, errors.ServerFault)(message)


def stated(headers: Mapping[str, Any], name: str) -> float | None:
    """Returns the number that a server states in its headers or metadata under that name, None without one."""
    try:
        return float(headers[name])
    except (KeyError, TypeError, ValueError):
        return None


def stated_error(status: int | str, message: str, headers: Mapping[str, Any], url: str = "") -> GuerdonError:
    """Returns `error_of` what a server states; with `url`, an error about the key names it and how to give a key."""
    retry_after_s, num_steps = stated(headers, "retry-after"), stated(headers, "guerdon-num-steps")
    error = error_of(status, message, retry_after_s, headers.get("guerdon-error"), num_steps)
    if url and isinstance(error, errors.Unauthenticated | errors.Forbidden):
        return type(error)(f"{error} ({url}; a key comes by GUERDON_API_KEY or credentials=)")
    return error


def tls_failure(url: str, why: str) -> errors.Unreachable:
    """Returns the error of a connection that TLS refuses; a retry would be refused as well."""
    error = errors.Unreachable(
        f"no connection to {url}: {why}; check that the server has TLS, and the credentials' ca_file and cert_file "
        "(GUERDON_CA_FILE, GUERDON_CERT_FILE)",
        may_have_arrived=False,
    )
    error.retryable = False
    return error


_BY_HTTP: dict[int, type[GuerdonError]] = {
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: errors.RouteNotFound,
    405: errors.MethodNotAllowed,
    413: errors.PayloadTooLarge,
    499: errors.Cancelled,
    501: errors.Unsupported,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
    507: errors.StorageFailed,
}
_BY_GRPC: dict[str, type[GuerdonError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.Forbidden,
    "NOT_FOUND": errors.UnknownModel,
    "RESOURCE_EXHAUSTED": errors.PayloadTooLarge,
    "UNIMPLEMENTED": errors.Unsupported,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
}
