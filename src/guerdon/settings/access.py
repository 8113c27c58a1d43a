"""Who may send which requests: roles, keys, TLS, and the addresses that a server accepts."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import urlsplit

from guerdon.errors import ConfigError
from guerdon.settings.fields import Contradictions, caught, setting

KEYS_VARIABLE = "GUERDON_API_KEYS"
"""The environment variable of a server's keys: lines as in the keys' file, separated by commas or line breaks."""


class Role(IntEnum):
    """A key's permissions; each role includes the roles before it."""

    SCORE = 1
    """Score, and read metadata and metrics."""
    TRAIN = 2
    """Train, validate, save, load, offload and onload a critic; put models to sleep."""
    ADMIN = 3
    """Load and unload reward models."""


@dataclass
class AccessConfig:
    """Keys, TLS, and the host names that a server accepts."""

    api_keys_file: str | None = setting(
        None,
        f"File of keys, one `ROLE NAME KEY` per line; roles are score, train and admin. {KEYS_VARIABLE} adds more.",
    )
    allow_anonymous: bool = setting(False, "Allow an address that other machines reach without keys.")
    allowed_hosts: list[str] = setting(
        [],
        "Additional Host name that a server without keys accepts. Loopback: localhost and the machine's name; other "
        "addresses: all names; IP addresses always.",
    )
    tls_cert: str | None = setting(None, "PEM file of the server's certificate and its chain.")
    tls_key: str | None = setting(None, "PEM file of the certificate's private key.")
    tls_client_ca: str | None = setting(None, "PEM file of the clients' CA (mutual TLS).")

    def contradictions(self) -> Contradictions:
        return caught(check_tls, self)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or empty, which means every address
        return False


def strip_credentials(url: str) -> str:
    """Returns the URL without its user info, which may hold a key, for logs and messages."""
    scheme = re.match(r"[a-zA-Z]+://|", url)
    assert scheme is not None
    return scheme[0] + url[scheme.end() :].rpartition("@")[2]


def is_entry(line: str) -> bool:
    """Returns whether a line holds a key: it is neither empty nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def split_keys_variable() -> list[str]:
    """Returns the entries of GUERDON_API_KEYS; some may be empty or comments."""
    lines = os.environ.get(KEYS_VARIABLE, "").splitlines()
    entries = [line.split(",") if is_entry(line) else [line] for line in lines]
    return [entry for line in entries for entry in line]


def has_keys(config: AccessConfig) -> bool:
    """Returns whether a keys' file or GUERDON_API_KEYS is set; a server that finds no key there does not start."""
    return config.api_keys_file is not None or bool(os.environ.get(KEYS_VARIABLE, "").strip())


def check_tls(config: AccessConfig) -> None:
    """Raises ConfigError if the TLS settings are incomplete."""
    if (config.tls_cert is None) != (config.tls_key is None):
        missing, there = ("tls_key", "tls_cert") if config.tls_key is None else ("tls_cert", "tls_key")
        raise ConfigError(f"{there} is given, but {missing} is not", "give both: TLS needs certificate and private key")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("tls_client_ca is given, but tls_cert is not", "also give tls_cert and tls_key")


def check_reach(config: AccessConfig, host: str) -> None:
    """Raises ConfigError if other machines would reach a server that requires neither key nor certificate."""
    if is_loopback(host) or has_keys(config) or config.tls_client_ca is not None or config.allow_anonymous:
        return
    raise ConfigError(
        f"host is {host or 'empty'}, which other machines reach, but clients would need no key",
        f"give --api-keys-file or {KEYS_VARIABLE}; or --allow-anonymous if everybody may use the server",
    )


def check_traces_endpoint(url: str) -> None:
    """Raises ConfigError if `url` cannot be the address of an OpenTelemetry collector."""
    shown = strip_credentials(url)
    wrong = ConfigError(f"traces is {shown!r}", "give a collector's OTLP/HTTP address, such as http://127.0.0.1:4318")
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise wrong from None
    if not is_fine or parts.query or parts.fragment:
        raise wrong
    if parts.username is not None:
        raise ConfigError(
            f"traces is {shown!r} preceded by a name or a key",
            "set OTEL_EXPORTER_OTLP_HEADERS=authorization=... in the environment: lists of processes show arguments",
        )
