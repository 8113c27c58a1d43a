"""Who may ask a server for what, and over which connections: roles and settings."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import urlsplit

from guerdon.errors import ConfigError
from guerdon.settings.fields import setting

KEYS_VARIABLE = "GUERDON_API_KEYS"
"""The environment variable of a server's keys, in the form of the file's lines, with commas or line ends between."""


class Role(IntEnum):
    """What a key allows; each role has what those before it have."""

    SCORE = 1
    """To score, and to read what is served, and the metrics."""
    TRAIN = 2
    """Also to train, validate, save, load, offload and onload a critic."""
    ADMIN = 3
    """Also to load and unload reward models."""


@dataclass
class AccessConfig:
    """Who may ask, and over which connections."""

    api_keys_file: str | None = setting(
        None, f"file of `ROLE NAME KEY` lines, of the roles score, train and admin; also read from {KEYS_VARIABLE}"
    )
    allow_anonymous: bool = setting(
        False, "listen on addresses that other machines reach, although whoever reaches them needs no key"
    )
    allowed_hosts: list[str] = setting(
        [],
        "additional Host name that a server without keys answers to; by default a loopback server answers to localhost "
        "and the machine's own name only, any other to every name; IP addresses always pass",
    )
    tls_cert: str | None = setting(None, "PEM file of the server's certificate, and of those that vouch for it")
    tls_key: str | None = setting(None, "PEM file of the certificate's private key")
    tls_client_ca: str | None = setting(
        None, "PEM file of the authority whose certificates clients must have (mutual TLS)"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or nothing, which is every address
        return False


def without_key(url: str) -> str:
    """The URL without its user info, for whoever reads a log: a key may stand there."""
    scheme = re.match(r"[a-zA-Z]+://|", url)
    assert scheme is not None
    return scheme[0] + url[scheme.end() :].rpartition("@")[2]


def is_entry(line: str) -> bool:
    """Whether the line is to be a key, and neither empty nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def variable_entries() -> list[str]:
    """What stands between the commas and line ends of the keys' variable; some may be empty, or comments."""
    lines = os.environ.get(KEYS_VARIABLE, "").splitlines()
    entries = [line.split(",") if is_entry(line) else [line] for line in lines]
    return [entry for line in entries for entry in line]


def has_keys(config: AccessConfig) -> bool:
    """Whether a file of keys is named or their variable set; a server that finds none there does not start."""
    return config.api_keys_file is not None or bool(os.environ.get(KEYS_VARIABLE, "").strip())


def check_tls(config: AccessConfig) -> None:
    """Raises ConfigError where one of certificate and private key is missing."""
    if (config.tls_cert is None) != (config.tls_key is None):
        missing, there = ("tls_key", "tls_cert") if config.tls_key is None else ("tls_cert", "tls_key")
        raise ConfigError(f"{there} is given, and {missing} is not", "give both: TLS needs certificate and private key")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("tls_client_ca is given, and tls_cert is not", "give tls_cert and tls_key, too")


def check_reach(config: AccessConfig, host: str) -> None:
    """Raises ConfigError where other machines would reach a server that asks nobody for a key or a certificate."""
    if is_loopback(host) or has_keys(config) or config.tls_client_ca is not None or config.allow_anonymous:
        return
    raise ConfigError(
        f"host is {host or 'empty'}, which other machines reach, and nobody would need a key",
        f"give --api-keys-file or {KEYS_VARIABLE}; or, where whoever reaches it may use it, --allow-anonymous",
    )


def check_traces_endpoint(url: str) -> None:
    """Raises ConfigError if `url` cannot be the address of an OpenTelemetry collector."""
    shown = without_key(url)
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine or parts.query or parts.fragment:
        raise ConfigError(f"traces is {shown!r}", "give a collector's OTLP/HTTP address, such as http://127.0.0.1:4318")
    if parts.username is not None:
        raise ConfigError(
            f"traces is {shown!r} with a name or a key before it",
            "set OTEL_EXPORTER_OTLP_HEADERS=authorization=... in the environment, which no list of processes shows",
        )
