"""One plain exchange with a server over HTTP, for what is no call of the protocol: its metrics, its name."""

from __future__ import annotations

import ssl

import httpx

from guerdon.client.addresses import Address
from guerdon.client.statuses import error_of, with_way_in
from guerdon.errors import Unreachable


def ask(address: Address, path: str, *, method: str = "GET", timeout_s: float = 5.0) -> httpx.Response:
    """The answer to a request without a body, of status 200; the address's credentials are shown.

    Raises Unreachable where there is none, the error that another status stands for, and ConfigError where a file of
    the credentials cannot be read.
    """
    tls = address.credentials.tls() if address.has_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    headers = {"Accept-Encoding": "identity"}
    if address.credentials.authorization is not None:
        headers["Authorization"] = address.credentials.authorization
    try:
        answer = httpx.request(method, address.url + path, headers=headers, verify=tls, timeout=timeout_s)
    except httpx.HTTPError as e:
        raise Unreachable(f"{address.url} gave no answer to {path}: {str(e) or 'timed out'}") from e
    if answer.status_code != 200:
        told = error_of(answer.status_code, f"{address.url} answered {answer.status_code} to {path}", None, None, None)
        raise with_way_in(told, address.url)
    return answer
