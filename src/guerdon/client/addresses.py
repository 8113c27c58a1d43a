"""Servers' addresses, and the credentials that each of them is shown. A key in a URL is in no text that is shown."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from guerdon.client.credentials import Credentials
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.settings.access import strip_credentials

_HELP = "give http://host:port, https://host:port, grpc://host:port or grpcs://host:port"


@dataclass(frozen=True, slots=True)
class Address:
    """One server: its URL, with a scheme, without user info and without a slash at its end."""

    url: str
    credentials: Credentials

    @property
    def is_grpc(self) -> bool:
        return self.url.startswith(("grpc://", "grpcs://"))

    @property
    def has_tls(self) -> bool:
        return self.url.startswith(("https://", "grpcs://"))

    @property
    def netloc(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc

    def httpx_options(self) -> dict[str, Any]:
        """How httpx speaks to it; raises ConfigError where a file of the credentials cannot be read.

        To be kept: reading the authorities that are trusted takes longer than many a call.
        """
        tls = self.credentials.tls() if self.has_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Binary tensors hardly shrink: decompressing them would cost more than it saves.
        headers = {"Accept-Encoding": "identity"}
        if self.credentials.authorization is not None:
            headers["Authorization"] = self.credentials.authorization
        return {"verify": tls, "headers": headers}


def addresses(url: str | Sequence[str], credentials: Credentials | None) -> list[Address]:
    """The servers of one URL or several, each once; raises InvalidRequest for one that is malformed.

    Without `credentials` they are the environment's. The password of a URL's user info is that server's key:
    http://x:KEY@host:port.
    """
    credentials = Credentials.from_environment() if credentials is None else credentials
    found: dict[str, Address] = {}
    for address in (_address(u, credentials) for u in ([url] if isinstance(url, str) else url)):
        found.setdefault(address.url, address)
    if not found:
        raise InvalidRequest("no server URL given")
    return list(found.values())


def _address(url: str, credentials: Credentials) -> Address:
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(full)
        port = parts.port
    except ValueError as e:
        what = "what stands behind the @ is no host and port" if "@" in url else str(e)
        raise InvalidRequest(f"server URL {strip_credentials(url)!r}: {what}; {_HELP}") from None
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not _is_host(parts.hostname) or not full.isprintable():
        raise InvalidRequest(f"server URL {strip_credentials(url)!r} is not one: {_HELP}")
    if full.count("@") != parts.netloc.count("@"):
        raise InvalidRequest(f"server URL {strip_credentials(url)!r} has an @ behind its host; in a key write / as %2F")
    if parts.scheme in ("grpc", "grpcs") and (port is None or parts.path):
        raise InvalidRequest(f"server URL {strip_credentials(url)!r} needs a port and no path: {_HELP}")
    info, at, _ = parts.netloc.rpartition("@")
    if at:
        if not parts.password:
            raise InvalidRequest(
                f"server URL {strip_credentials(url)!r} has a name without a key: write x:KEY@ before the host"
            )
        try:
            credentials = dataclasses.replace(credentials, api_key=unquote(parts.password))
        except ConfigError as e:
            raise InvalidRequest(f"server URL {strip_credentials(url)!r}: {e}") from None
    return Address(full.replace(info + at, "", 1), credentials)


def _is_host(name: str | None) -> bool:
    """Whether a name can be looked up, or is an address: no part of it is empty or too long."""
    try:
        return bool(name and name.encode("idna"))
    except UnicodeError:
        return False
