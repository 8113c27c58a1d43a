"""What the machine allows: ports, open files, a place for models; and what the environment says about keys."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from guerdon.cli.doctor.findings import Finding, note, ok, problem
from guerdon.client import Credentials
from guerdon.client.addresses import addresses
from guerdon.client.http_transport import fetch_json
from guerdon.errors import ConfigError, GuerdonError
from guerdon.settings.access import KEYS_VARIABLE, AccessConfig, has_keys, is_entry, split_keys_variable

PORTS = {
    5555: "guerdon serve, HTTP",
    5556: "guerdon serve-critic, HTTP",
    5557: "guerdon serve, gRPC",
    5558: "guerdon serve-critic, gRPC",
}
"""The ports that are listened on unless others are given."""

_FILES = 4096
"""Open files that a busy server may want: one a connection, and those of models and libraries."""
_FREE_GIB = 5.0


def examine() -> Iterator[Finding]:
    """Ports, the limit on open files, the cache, keys and proxies."""
    for port, what in PORTS.items():
        yield _port(port, what)
    yield _open_files()
    yield cache(os.environ)
    yield from _keys()
    yield from _proxies()


def _port(port: int, what: str) -> Finding:
    subject = f"port {port}"
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ok(subject, f"free ({what})")
    except OSError as e:
        holder = _who(port)
        why = f"taken by {holder}" if holder else f"cannot be listened on: {e.strerror}"
    flag = "--grpc-port" if "gRPC" in what else "--port"
    return note(subject, f"{why} ({what})", f"give another by {flag}, unless that is the server which is meant")


def _who(port: int) -> str:
    """What answers there over HTTP, by its own words; empty where nothing is understood."""
    try:
        (address,) = addresses(f"http://127.0.0.1:{port}", Credentials())
        told = fetch_json(address, "/v2", dict, timeout_s=1.0)
        return f"{told['name']} {told['version']}"
    except (GuerdonError, KeyError):  # nothing, or something else
        return ""


def _open_files() -> Finding:
    subject = "open files"
    try:
        import resource
    except ImportError:  # not on Windows
        return ok(subject, "this platform sets no limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard:,}"
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        return note(
            subject,
            f"{told}, and each connection is one",
            f"`ulimit -Hn {_FILES}` as root before `guerdon serve`, or LimitNOFILE={_FILES} in its systemd unit",
        )
    return ok(subject, f"{told} ({soft:,} unless asked for; a server asks by itself)")


def cache(environment: Mapping[str, str]) -> Finding:
    """Whether models of the Hugging Face hub have a place to be kept."""
    subject, folder = "model cache", _cache_folder(environment)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free_gib = shutil.disk_usage(existing).free / 2**30
    except OSError as e:
        why = f"{folder} cannot be written: {e.strerror}"
        return problem(subject, why, "set HF_HOME to a folder that can; folders of your own are served without it")
    told = f"{folder}, {free_gib:,.1f} GiB free"
    if free_gib < _FREE_GIB:
        return note(subject, told, "make room, or set HF_HOME to a folder on a larger disk, for models of the hub")
    return ok(subject, told + (", offline: nothing is downloaded" if environment.get("HF_HUB_OFFLINE") else ""))


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models."""
    if own := environment.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser().absolute() / "hub"


def _keys() -> Iterator[Finding]:
    """Which variables of keys are set; what is in them is never told."""
    if not has_keys(AccessConfig()):
        yield ok(KEYS_VARIABLE, "not set: servers ask for no key")
    elif any(map(is_entry, split_keys_variable())):
        yield ok(KEYS_VARIABLE, "set: servers started here ask for a key")
    else:
        what = "write `ROLE NAME KEY` entries into it, or unset it"
        yield problem(KEYS_VARIABLE, "set, and has no keys: no server starts here without a file of keys", what)
    try:
        credentials = Credentials.from_environment()
        credentials.read()
    except ConfigError as e:
        yield problem("client's credentials", str(e), e.help)
        return
    told = "set: clients show it" if credentials.api_key else "not set: clients show none"
    yield ok("GUERDON_API_KEY", told)


def _proxies() -> Iterator[Finding]:
    names = [name for name in ("http_proxy", "https_proxy", "all_proxy") if _variable(name)]
    if names:
        yield note(
            "proxy",
            f"{', '.join(names)} set, and HTTP clients go by it, but for {_variable('no_proxy') or 'nothing'}",
            "NO_PROXY=127.0.0.1,localhost and your servers' names, where these are to be reached directly",
        )


def _variable(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.upper()) or ""
