"""One plain exchange with a server over HTTP, for what is no call of the protocol: its metrics, its name."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import orjson

from guerdon.client.addresses import Address
from guerdon.client.statuses import error_of
from guerdon.errors import ServerFault, Unreachable

Json = TypeVar("Json", dict[str, Any], list[Any])


def ask(address: Address, path: str, *, method: str = "GET", timeout_s: float = 5.0) -> httpx.Response:
    """The answer to a request without a body, of status 200; the address's credentials are shown.

    Raises Unreachable where there is none, the error that another status stands for, with the server's own text where
    it has one, and ConfigError where a file of the credentials cannot be read.
    """
    options = address.httpx_options()
    try:
        answer = httpx.request(method, address.url + path, timeout=timeout_s, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise Unreachable(f"{address.url} gave no answer to {path}: {str(e) or 'timed out'}") from e
    if answer.status_code != 200:
        told = _read(answer)
        told = told if isinstance(told, dict) else {}
        text = told.get("error")
        if not isinstance(text, str):
            text = f"{address.url} answered {answer.status_code} to {path}"
        raise error_of(answer.status_code, text, kind=told.get("kind"))
    return answer


def ask_json(address: Address, path: str, cls: type[Json], *, method: str = "GET", timeout_s: float = 5.0) -> Json:
    """The answer of `ask` as JSON: a `dict` or a `list`.

    Raises what `ask` raises, and ServerFault where it is something else, as that of any server of pages.
    """
    told = _read(ask(address, path, method=method, timeout_s=timeout_s))
    if not isinstance(told, cls):
        raise ServerFault(f"{address.url} answered {path} with what no server of the open inference protocol does")
    return told


def _read(answer: httpx.Response) -> Any:
    """The answer's JSON; None where it has none."""
    try:
        return orjson.loads(answer.content)
    except orjson.JSONDecodeError:
        return None
