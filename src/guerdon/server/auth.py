"""Who asks: a key's holder and role."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from guerdon.errors import ConfigError, Forbidden, Unauthenticated
from guerdon.server.metrics import UNKNOWN
from guerdon.settings.access import KEYS_VARIABLE, AccessConfig, Role, has_keys, is_entry, split_keys_variable

log = logging.getLogger(__name__)

LEAST_KEY = 16
"""Characters of the shortest key: none shorter withstands guessing."""

PYTRITONS_HEADER = "triton-access-token"
PYTRITONS_METADATA = f"triton-grpc-protocol-{PYTRITONS_HEADER}"
"""Where PyTriton's clients put their `access_token`, over HTTP and over gRPC."""

_FORM = "write `ROLE NAME KEY`, such as `score trainer-a ` and what `openssl rand -hex 32` prints"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever asks: the name that stands before a key, and its role. Without keys the name is empty."""

    name: str
    role: Role

    def need(self, role: Role, what: str) -> None:
        """Raises Forbidden where the caller may not do `what`, which needs `role`."""
        if self.role >= role:
            return
        needed = role.name.lower()
        if not self.name:
            raise Forbidden(f"{what} needs a key of the role {needed}, and this server was started without keys")
        raise Forbidden(f"{what} needs a key of the role {needed}; {self.name} has the role {self.role.name.lower()}")


ANYBODY = Caller("", Role.TRAIN)
"""Where there are no keys; what takes an admin needs one in any case."""


class Access:
    """The keys of one server; `names` are their holders'."""

    def __init__(self, config: AccessConfig) -> None:
        """Reads the keys; raises ConfigError, which names the line and never shows a key, or says that there is none
        where there should be."""
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
        if has_keys(config) and not self._callers:  # whoever set it does not mean that nobody needs one
            raise ConfigError(f"{KEYS_VARIABLE} is set, and has no keys", f"{_FORM}; or unset it")
        self.names = tuple(dict.fromkeys(caller.name for _, caller in self._callers))

    @property
    def has_admin(self) -> bool:
        """Whether anybody may load and unload models."""
        return any(caller.role is Role.ADMIN for _, caller in self._callers)

    def caller(self, authorization: bytes | str | None, token: bytes | str | None = None) -> Caller:
        """Who sends this header: `Bearer KEY`, or `Basic` with the key for its password; raises Unauthenticated.

        `token` is the key by itself, as PyTriton's clients send it; it counts where there is no header. How long it
        takes tells nothing of a key: digests are compared, each of them to its end.
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
        """Whether `caller` finds somebody."""
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
            if role.upper() not in Role.__members__:  # which is not shown: it may be a key
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
            # One holder may have two keys, the old one and the new, while a key is replaced.
            if any(digest == known or (name == other.name and caller != other) for known, other in self._callers):
                raise ConfigError(
                    f"entry {number} of {where} has a key a second time, or another role for {name}",
                    "give every key once, and every name one role",
                )
            self._callers.append((digest, caller))


def warn_of_readers(config: AccessConfig) -> None:
    """Says on the log which file of keys others than its owner may read."""
    for path in (config.api_keys_file, config.tls_key):
        if path is not None and os.stat(path).st_mode & 0o044:
            log.warning("%s is secret, and others than its owner may read it: `chmod 600` it", path)


def _key(authorization: bytes | str) -> bytes:
    """The key in the header; raises Unauthenticated where there is none."""
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
