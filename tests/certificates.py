"""Certificates of authorities that exist for a test only."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and what it vouches for: a server at 127.0.0.1 and localhost, and a client."""

    ca: str
    cert: str
    key: str
    client_cert: str
    client_key: str


def made(folder: Path, *hosts: str) -> Certificates:
    """Files of a new authority in `folder`; the server is at `hosts`, by default 127.0.0.1 and localhost."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, certificate in (
        ("server", authority.issue_cert(*(hosts or ("127.0.0.1", "localhost")))),
        ("client", authority.issue_cert("trainer@example.com")),
    ):
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        for i, pem in enumerate(certificate.cert_chain_pems):
            pem.write_to_path(str(folder / f"{name}.pem"), append=i > 0)
    files = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return Certificates(*(str(folder / name) for name in files))
