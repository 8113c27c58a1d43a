"""Authentication: keys, their holders and roles, and TLS."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from guerdon.errors import ConfigError, Forbidden, Unauthenticated
from guerdon.server.metrics import UNKNOWN
from guerdon.settings.access import KEYS_VARIABLE, AccessConfig, Role, has_keys, is_entry, split_keys_variable

log = logging.getLogger(__name__)

LEAST_KEY = 16
"""Characters of the shortest key: shorter ones can be guessed."""

PYTRITONS_HEADER = "triton-access-token"
PYTRITONS_METADATA = f"triton-grpc-protocol-{PYTRITONS_HEADER}"
"""Where PyTriton's clients send their `access_token`, over HTTP and over gRPC."""

_FORM = "write `ROLE NAME KEY`, such as `score trainer-a ` and what `openssl rand -hex 32` prints"

_TLS_HELP = "give PEM files: the certificate with its chain, its unencrypted private key, and the clients' CA"


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, with its role. Without keys the name is empty."""

    name: str
    role: Role

    def need(self, role: Role, what: str) -> None:
        """Raises Forbidden if the caller lacks the `role` that `what` needs."""
        if self.role >= role:
            return
        needed = role.name.lower()
        if not self.name:
            raise Forbidden(f"{what} needs a key of the role {needed}, and this server was started without keys")
        raise Forbidden(f"{what} needs a key of the role {needed}; {self.name} has the role {self.role.name.lower()}")


ANYBODY = Caller("", Role.TRAIN)
"""The caller if there are no keys; an admin needs one in any case."""


class Access:
    """The keys of one server; `names` are their holders."""

    def __init__(self, config: AccessConfig) -> None:
        """Reads the keys; raises ConfigError, which names the line and never shows a key, also if keys are missing."""
        self._callers: list[tuple[bytes, Caller]] = []
        if config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            try:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as e:
                raise ConfigError(f"cannot read the keys in {path}: {e}", "give a text file of its keys") from e
            self._read(lines, str(path))
            if not self._callers:
                raise ConfigError(f"{path} has no keys", _FORM)
        self._read(split_keys_variable(), KEYS_VARIABLE)
        if has_keys(config) and not self._callers:  # an empty variable must not open the server
            raise ConfigError(f"{KEYS_VARIABLE} is set, and has no keys", f"{_FORM}; or unset it")
        self.names = tuple(dict.fromkeys(caller.name for _, caller in self._callers))

    @property
    def has_admin(self) -> bool:
        """Whether a key has the role admin."""
        return any(caller.role is Role.ADMIN for _, caller in self._callers)

    def caller(self, authorization: bytes | str | None, token: bytes | str | None = None) -> Caller:
        """Returns the sender of this header: `Bearer KEY`, or `Basic` with the key as password.

        `token` is the bare key, as PyTriton's clients send it; it counts if there is no header. Constant time: compares
        all digests, each to its end. Raises Unauthenticated.
        """
        if not self._callers:
            return ANYBODY
        if authorization is not None:
            key = _key(authorization)
        elif token is not None:
            key = _bytes(token)
        else:
            raise Unauthenticated("this server needs a key: send the header `Authorization: Bearer KEY`")
        given = hashlib.sha256(key).digest()
        found = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise Unauthenticated("the key is not one of this server's")
        return found

    def knows(self, authorization: bytes | str | None, token: bytes | str | None = None) -> bool:
        """Whether the key is valid."""
        try:
            self.caller(authorization, token)
        except Unauthenticated:
            return False
        return True

    def _read(self, lines: list[str], where: str) -> None:
        for number, line in enumerate(lines, 1):
            if not is_entry(line):
                continue
            parts = line.split()
            if len(parts) != 3:
                raise ConfigError(f"entry {number} of {where} is no key", _FORM)
            role, name, key = parts
            if role.upper() not in Role.__members__:  # not quoted: it may be a key
                raise ConfigError(f"entry {number} of {where} does not begin with a role: score, train or admin", _FORM)
            if not re.fullmatch(r"[\w.-]{1,64}", name) or name == UNKNOWN:
                raise ConfigError(
                    f"entry {number} of {where}: the name cannot be one",
                    f"take letters, digits, _ . - for it, and not {UNKNOWN}, by which the keyless are counted",
                )
            if "," in key or not (key.isascii() and key.isprintable()):
                raise ConfigError(f"entry {number} of {where}: the key of {name} cannot travel in a header", _FORM)
            if len(key) < LEAST_KEY:
                raise ConfigError(
                    f"entry {number} of {where}: the key of {name} has {len(key)} characters",
                    f"take at least {LEAST_KEY}: `openssl rand -hex 32` prints one",
                )
            digest = hashlib.sha256(key.encode()).digest()
            caller = Caller(name, Role[role.upper()])
            # Key rotation: one holder may have an old and a new key.
            if any(digest == known or (name == other.name and caller != other) for known, other in self._callers):
                raise ConfigError(
                    f"entry {number} of {where} has a key a second time, or another role for {name}",
                    "give every key once, and every name one role",
                )
            self._callers.append((digest, caller))


def warn_of_readers(config: AccessConfig) -> None:
    """Logs a warning for each file of secrets that others than its owner may read."""
    for path in (config.api_keys_file, config.tls_key):
        if path is not None and os.stat(path).st_mode & 0o044:
            log.warning("%s is secret, and others may read it: `chmod 600` it", path)


def tls_context(config: AccessConfig) -> ssl.SSLContext | None:
    """Returns the server's side of TLS 1.2 or later, None if it is off; raises ConfigError if a file is wrong.

    With `tls_client_ca` a client needs a certificate of that authority.
    """
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    for path in (cert, key, config.tls_client_ca):
        _read_file(path)
    _check_certificates(cert)
    try:
        made.load_cert_chain(cert, key, password="")  # else an encrypted key prompts for its password
    except (OSError, ValueError) as e:  # an ssl.SSLError is an OSError
        raise ConfigError(f"{key} {_why_not(_read_file(key) or b'', cert)}", _TLS_HELP) from e
    if config.tls_client_ca is not None:
        _check_certificates(config.tls_client_ca)
        made.load_verify_locations(config.tls_client_ca)
        made.verify_mode = ssl.CERT_REQUIRED
    return made


def read_pems(config: AccessConfig) -> tuple[bytes, bytes, bytes | None] | None:
    """Returns private key, certificate and the clients' authority as their files have them; None if TLS is off."""
    key, cert, authority = (_read_file(path) for path in (config.tls_key, config.tls_cert, config.tls_client_ca))
    return None if key is None or cert is None else (key, cert, authority)


def _read_file(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", _TLS_HELP) from e


def _check_certificates(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} has no certificate in PEM that can be read", _TLS_HELP) from e


def _why_not(key: bytes, cert: str) -> str:
    if b"PRIVATE KEY-----" not in key:
        return "has no private key in PEM"
    return "is encrypted" if b"ENCRYPTED" in key else f"cannot be read, or is not the private key of {cert}"


def _key(authorization: bytes | str) -> bytes:
    """Returns the key in the header; raises Unauthenticated if there is none."""
    scheme, _, value = _bytes(authorization).strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            pass
    raise Unauthenticated("the header Authorization has no key: send `Bearer KEY`, or `Basic` with it for the password")


def _bytes(header: bytes | str) -> bytes:
    return header if isinstance(header, bytes) else header.encode(errors="backslashreplace")
