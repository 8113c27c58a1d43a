"""What a client shows a server, and whom it trusts: a key, and the files of TLS."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from guerdon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Credentials:
    """An API key, and PEM files of TLS: the authorities trusted, and the client's own certificate and its key.

    Without `ca_file` the public authorities are trusted. `key_file` may be left out where `cert_file` has both.
    """

    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError("key_file is given, and cert_file is not", "give the certificate that the key belongs to")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("the API key is empty or has characters that no header takes", "give it as it was made")

    @classmethod
    def from_environment(cls) -> Credentials:
        """Those in GUERDON_API_KEY, GUERDON_CA_FILE, GUERDON_CERT_FILE and GUERDON_KEY_FILE."""
        names = ("API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE")
        return cls(*(os.environ.get(f"GUERDON_{name}", "").strip() or None for name in names))

    @property
    def authorization(self) -> str | None:
        """The header `Authorization`, None without a key."""
        return None if self.api_key is None else f"Bearer {self.api_key}"

    def tls(self) -> ssl.SSLContext:
        """How httpx is to speak TLS; raises ConfigError where a file cannot be read, does not fit or is encrypted."""
        context = httpx.create_ssl_context() if self.ca_file is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
            if self.cert_file is not None:
                # A password that is wrong: without one OpenSSL would ask at the terminal, and wait.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, ValueError) as e:  # also what ssl raises
            files = [name for name in (self.ca_file, self.cert_file, self.key_file) if name is not None]
            raise ConfigError(
                f"cannot read certificates in {', '.join(files)}: {e}",
                "give PEM files; a key must fit its certificate, and be without a password",
            ) from e
        return context

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """What the files of authorities, key and certificate hold, as gRPC takes them; raises what `tls` does."""
        if self.ca_file is not None or self.cert_file is not None:
            self.tls()  # gRPC itself finds out at every connection only, and does not say what is wrong
        own_key = self.key_file or self.cert_file
        return _read(self.ca_file), _read(own_key), _read(self.cert_file)


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
