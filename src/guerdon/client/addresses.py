"""Addresses of servers, and the credentials that each of them is shown. No text that is shown holds a key."""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from guerdon.errors import ConfigError, InvalidRequest
from guerdon.settings.access import strip_credentials

_HELP = "give http://host:port, https://host:port, grpc://host:port or grpcs://host:port"


@dataclass(frozen=True, slots=True)
class Credentials:
    """An API key, and PEM files for TLS: trusted authorities, and the client's own certificate with its key.

    Without `ca_file` the public authorities are trusted. `key_file` may be left out if `cert_file` holds both.
    """

    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError("key_file is set without cert_file", "give the certificate that the key belongs to")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            what = "is empty" if not self.api_key else "has a line break, or a character that no header takes"
            raise ConfigError(f"the API key {what}", "give one key (GUERDON_API_KEY, or in the URL), as it was made")

    @classmethod
    def from_environment(cls) -> Credentials:
        """Reads GUERDON_API_KEY, GUERDON_CA_FILE, GUERDON_CERT_FILE and GUERDON_KEY_FILE."""
        names = ("API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE")
        return cls(*(os.environ.get(f"GUERDON_{name}", "").strip() or None for name in names))

    @property
    def authorization(self) -> str | None:
        """The value of the header `Authorization`, None without a key."""
        return None if self.api_key is None else f"Bearer {self.api_key}"

    def tls(self) -> ssl.SSLContext:
        """Returns the context for TLS over HTTP.

        Raises ConfigError if a file cannot be read, does not fit the others or is encrypted.
        """
        context = httpx.create_ssl_context() if self.ca_file is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
            if self.cert_file is not None:
                # Without a password OpenSSL would prompt at the terminal; an empty one fails instead.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, ValueError) as e:  # includes ssl.SSLError
            files = [name for name in (self.ca_file, self.cert_file, self.key_file) if name is not None]
            raise ConfigError(
                f"cannot read certificates in {', '.join(files)}: {e}",
                "give PEM files; a key must fit its certificate, and be without a password",
            ) from e
        return context

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Returns the CA bundle, the key and the certificate as PEM bytes, in the order of gRPC's arguments.

        Raises what `tls` raises.
        """
        if self.ca_file is not None or self.cert_file is not None:
            self.tls()  # gRPC would fail at each connection only, without saying why
        own_key = self.key_file or self.cert_file
        return _read(self.ca_file), _read(own_key), _read(self.cert_file)


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

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each HTTP request."""
        # Binary tensors hardly compress.
        headers = {"Accept-Encoding": "identity", "User-Agent": "guerdon"}
        if self.credentials.authorization is not None:
            headers["Authorization"] = self.credentials.authorization
        return headers


def addresses(url: str | Sequence[str], credentials: Credentials | None) -> list[Address]:
    """Returns the servers of one URL or several, each once; raises InvalidRequest for a malformed URL.

    Without `credentials`, reads them from the environment. The password of a URL's user info is that server's key:
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
        what = "the part after the @ is no host and port" if "@" in url else str(e)
        raise InvalidRequest(f"server URL {strip_credentials(url)!r}: {what}; {_HELP}") from None
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not _is_host(parts.hostname) or not full.isprintable():
        raise InvalidRequest(f"server URL {strip_credentials(url)!r} is malformed: {_HELP}")
    if full.count("@") != parts.netloc.count("@"):
        raise InvalidRequest(f"server URL {strip_credentials(url)!r} has an @ after its host; in a key write / as %2F")
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
    """Returns whether the name is one that DNS takes: no part is empty or too long."""
    try:
        return bool(name and name.encode("idna"))
    except UnicodeError:
        return False


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
