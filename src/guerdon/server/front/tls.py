"""What a server's sockets need for TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

from guerdon.errors import ConfigError
from guerdon.settings.access import AccessConfig

_HELP = "give PEM files: the certificate and those that vouch for it, its unencrypted private key, and the clients' CA"


def context(config: AccessConfig) -> ssl.SSLContext | None:
    """The server's side of TLS 1.2 or later, None where it is off; raises ConfigError where a file is not what it says.

    With `tls_client_ca` a client must have a certificate of that authority.
    """
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    for path in (cert, key, config.tls_client_ca):
        _read(path)
    _check_certificates(cert)
    try:
        made.load_cert_chain(cert, key, password="")  # else the terminal would ask for an encrypted key's password
    except (OSError, ValueError) as e:  # an ssl.SSLError is an OSError
        raise ConfigError(f"{key} {_why_not(_read(key) or b'', cert)}", _HELP) from e
    if config.tls_client_ca is not None:
        _check_certificates(config.tls_client_ca)
        made.load_verify_locations(config.tls_client_ca)
        made.verify_mode = ssl.CERT_REQUIRED
    return made


def pems(config: AccessConfig) -> tuple[bytes, bytes, bytes | None] | None:
    """Private key, certificate and the clients' authority as their files have them; None where TLS is off."""
    key, cert, authority = (_read(path) for path in (config.tls_key, config.tls_cert, config.tls_client_ca))
    return None if key is None or cert is None else (key, cert, authority)


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", _HELP) from e


def _check_certificates(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} has no certificate in PEM that can be read", _HELP) from e


def _why_not(key: bytes, cert: str) -> str:
    if b"PRIVATE KEY-----" not in key:
        return "has no private key in PEM"
    return "is encrypted" if b"ENCRYPTED" in key else f"cannot be read, or is not the private key of {cert}"
