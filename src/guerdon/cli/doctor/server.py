"""What a server answers: whether it is reached and ready, what it is, and its models."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from guerdon.cli.doctor.findings import Finding, note, ok, problem
from guerdon.cli.doctor.installation import version_of
from guerdon.client.addresses import Address, addresses
from guerdon.client.http_transport import fetch, fetch_json
from guerdon.errors import ConfigError, Forbidden, GuerdonError, Unauthenticated, install_command

_TIMEOUT_S = 5.0
_READY = "wait until its models are loaded; its log says how far it is"
_KEY = "set GUERDON_API_KEY to a key that the server knows"
_INFO = re.compile(r"guerdon_model_info\{(.*)\} 1(?:\.0)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def examine(url: str) -> Iterator[Finding]:
    """Whether the server at the URL is reached and ready, its version, and its models."""
    try:
        (address,) = addresses(url, None)
    except ConfigError as e:
        yield problem("URL", str(e), e.help)
        return
    except GuerdonError as e:
        yield problem("URL", str(e), "give it as the server said when it was ready")
        return
    subject = address.url
    try:
        yield from (_over_grpc if address.is_grpc else _over_http)(address)
    except (Unauthenticated, Forbidden) as e:
        yield problem(subject, str(e), _KEY)
    except ConfigError as e:
        yield problem(subject, str(e), e.help)
    except GuerdonError as e:
        yield problem(subject, str(e), "check that the server runs, and its host, port and scheme")


def _over_http(address: Address) -> Iterator[Finding]:
    subject = address.url
    fetch(address, "/v2/health/live", timeout_s=_TIMEOUT_S)
    started = time.perf_counter()
    fetch(address, "/v2/health/live", timeout_s=_TIMEOUT_S)
    yield ok(subject, f"live; answers within {1e3 * (time.perf_counter() - started):.1f} ms, the connection included")
    try:
        fetch(address, "/v2/health/ready", timeout_s=_TIMEOUT_S)
    except GuerdonError:
        yield problem(subject, "not ready", _READY)
    about = fetch_json(address, "/v2", dict)
    yield _version(subject, str(about.get("name", "?")), str(about.get("version", "?")))
    index = fetch_json(address, "/v2/repository/index", list, method="POST")
    more = _infos(address)
    for model in (entry for entry in index if isinstance(entry, dict)):
        name, state, reason = (str(model.get(key, "")) for key in ("name", "state", "reason"))
        yield _model(subject, name, state, reason, more.get(name, ""))


def _over_grpc(address: Address) -> Iterator[Finding]:
    subject = address.url
    if find_spec("tritonclient") is None or find_spec("grpc") is None:
        yield problem(subject, "gRPC is not installed", f"{install_command('grpc')}, or give the server's HTTP URL")
        return
    import grpc
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    key = address.credentials.authorization
    options: dict[str, Any] = {"timeout": _TIMEOUT_S, "metadata": () if key is None else (("authorization", key),)}
    authorities, private_key, certificate = address.credentials.read()
    channel = (
        grpc.secure_channel(address.netloc, grpc.ssl_channel_credentials(authorities, private_key, certificate))
        if address.has_tls
        else grpc.insecure_channel(address.netloc)
    )
    with channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            stub.ServerLive(pb.ServerLiveRequest(), **options)
            started = time.perf_counter()
            stub.ServerLive(pb.ServerLiveRequest(), **options)
            yield ok(subject, f"live; answers within {1e3 * (time.perf_counter() - started):.1f} ms")
            if not stub.ServerReady(pb.ServerReadyRequest(), **options).ready:
                yield problem(subject, "not ready", _READY)
            about = stub.ServerMetadata(pb.ServerMetadataRequest(), **options)
            yield _version(subject, about.name, about.version)
            for model in stub.RepositoryIndex(pb.RepositoryIndexRequest(), **options).models:
                yield _model(subject, model.name, model.state, model.reason, "")
        except grpc.RpcError as e:
            code, refused = e.code().name, ("UNAUTHENTICATED", "PERMISSION_DENIED")
            remedy = _KEY if code in refused else "check that a gRPC port is meant, its TLS (grpcs://), host and port"
            yield problem(subject, f"{code}: {e.details()}", remedy)


def _version(subject: str, name: str, version: str) -> Finding:
    own = version_of("guerdon")
    if name != "guerdon":
        return note(subject, f"{name} {version}, a server of the open inference protocol", "nothing, if that is meant")
    if own is not None and version != own:
        return note(
            subject, f"guerdon {version}, and here is {own}", "install the same on both sides, if something is odd"
        )
    return ok(subject, f"guerdon {version}, as here")


def _model(subject: str, name: str, state: str, reason: str, more: str) -> Finding:
    if state == "READY":
        return ok(subject, f"model {name} is ready{more and ': ' + more}")
    remedy = f"an admin may load it: POST /v2/repository/models/{name}/load" if reason == "unloaded" else _READY
    return note(subject, f"model {name} is {state.lower() or 'unknown'}{reason and ': ' + reason}", remedy)


def _infos(address: Address) -> dict[str, str]:
    """What each model is, by its name, where the server's metrics say so."""
    try:
        text = fetch(address, "/metrics").text
    except GuerdonError:
        return {}
    infos = {}
    for match in filter(None, map(_INFO.fullmatch, text.splitlines())):
        told = dict(_LABEL.findall(match[1]))
        if {"model", "kind", "dtype", "device", "path", "weights_version"} <= told.keys():
            infos[told["model"]] = "{kind}, {dtype} on {device}, {path}, weights {weights_version}".format(**told)
    return infos
