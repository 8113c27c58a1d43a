"""Opens pages in a headless Chromium; they must not log errors or contact other hosts.

The tests of a module use one tab after another, because opening a tab costs a second of CPU time.
"""

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


def leave(page: Any) -> None:
    """Leaves the page, which otherwise goes on polling, and forgets what it stored."""
    if page.url != "about:blank":
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        page.goto("about:blank")


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


class Tab:
    """A page in a context of its own."""

    def __init__(self, chromium: Any, **settings: Any) -> None:
        self.context = chromium.new_context(**settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self._listeners: list[tuple[str, Callable[[Any], None]]] = []

    def listen(self, event: str, handler: Callable[[Any], None]) -> None:
        """Adds a listener that `clear` removes."""
        self.page.on(event, handler)
        self._listeners.append((event, handler))

    def clear(self) -> None:
        """Leaves the page and removes everything that the next one could notice."""
        leave(self.page)
        for event, handler in self._listeners:
            self.page.remove_listener(event, handler)
        self._listeners.clear()
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.mouse.move(0, 0)
        self.context.clear_cookies()


@pytest.fixture(scope="module")
def free_tabs(chromium: Any) -> list[Tab]:
    """The tab that the module's tests share, while none of them uses it."""
    return []


@pytest.fixture
def visit(chromium: Any, free_tabs: list[Tab]) -> Iterator[Visit]:
    """Opens a URL, and waits until it is `live` or in the given `state`.

    Fails at the end if a page logged anything that contains none of `expected`, or sent a request to another host.
    The page has a tab of its own if `in_own_tab`, or if its context has `settings`.
    """
    shared: list[Tab] = []
    own: list[Tab] = []
    wrong: list[str] = []

    def open_page(
        url: str,
        state: str = "live",
        *,
        size: tuple[int, int] = WIDE,
        color_scheme: str = "light",
        in_own_tab: bool = False,
        expected: tuple[str, ...] = (),
        prepare: Callable[[Any], None] = lambda page: None,
        **settings: Any,
    ) -> Any:
        if in_own_tab or settings or shared:
            tab = Tab(chromium, **settings)
            own.append(tab)
        else:
            tab = free_tabs.pop() if free_tabs else Tab(chromium)
            shared.append(tab)
        page = tab.page
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=color_scheme)
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

        tab.listen("console", said)
        tab.listen("pageerror", failed)
        tab.listen("request", asked)
        prepare(page)
        page.goto(url)
        page.wait_for_selector(f"body[data-state={state}]")
        return page

    yield open_page
    for tab in own:
        tab.context.close()
    for tab in shared:
        tab.clear()
        free_tabs.append(tab)
    assert not wrong
