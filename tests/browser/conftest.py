"""Opens pages in a headless Chromium; they must not log errors or contact other hosts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browser.chromium import find, launched

NEEDED = "GUERDON_NEEDS_BROWSER"
MISSING = "there is no Chromium: `make browser` sees to one, and CHROMIUM names one that is elsewhere"

WIDE, PHONE = (1440, 900), (390, 844)

Visit = Callable[..., Any]

PATIENCE_S = 20.0


def until(page: Any, holds: str) -> None:
    """Waits until the expression is true in the page, whose CSP makes playwright's own wait_for_function fail."""
    comes(page, lambda: page.evaluate(holds), holds)


def comes(page: Any, what: Callable[[], Any], told: str = "what is waited for") -> None:
    """Polls until `what` is true; on a busy machine figures may appear late."""
    ends = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < ends, f"not within {PATIENCE_S:g} s: {told}"
        page.wait_for_timeout(50)


def ask_again(page: Any) -> None:
    """Makes the page poll at once, as when its reader comes back to its tab, instead of in two seconds."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def alter(page: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Lets `change` modify each snapshot before the page gets it."""

    def answer(route: Any) -> None:
        fetched = route.fetch()
        told = fetched.json()
        change(told)
        route.fulfill(status=fetched.status, content_type="application/json", body=json.dumps(told))

    page.route("**/dashboard/snapshot*", answer)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    executable = find()
    if executable is None and os.environ.get(NEEDED) == "1":
        pytest.fail(MISSING)
    if executable is None:
        pytest.skip(MISSING)
    with launched(executable) as browser:
        yield browser


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """Opens a URL, and waits until it is `live` or in the given `state`.

    Fails at the end if a page logged anything that contains none of `expected`, or sent a request to another host.
    """
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(
        url: str,
        state: str = "live",
        *,
        size: tuple[int, int] = WIDE,
        expected: tuple[str, ...] = (),
        prepare: Callable[[Any], None] = lambda page: None,
        **settings: Any,
    ) -> Any:
        context = chromium.new_context(viewport={"width": size[0], "height": size[1]}, **settings)
        contexts.append(context)
        page = context.new_page()
        origin = "/".join(url.split("/")[:3]) + "/"

        def said(message: Any) -> None:
            if message.type in ("error", "warning") and not any(text in message.text for text in expected):
                wrong.append(f"{message.type}: {message.text}")

        def failed(error: Any) -> None:
            if not any(text in str(error) for text in expected):
                wrong.append(str(error))

        def asked(request: Any) -> None:
            if not request.url.startswith((origin, "data:")):
                wrong.append(f"asked {request.url}")

        page.on("console", said)
        page.on("pageerror", failed)
        page.on("request", asked)
        page.set_default_timeout(PATIENCE_S * 1000)
        prepare(page)
        page.goto(url)
        page.wait_for_selector(f"body[data-state={state}]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong
