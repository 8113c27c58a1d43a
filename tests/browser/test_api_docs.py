"""Swagger UI at /docs in a Chromium: it asks no other host, fits a phone, and sends the key that its reader gives."""

from collections.abc import Iterator
from typing import Any

import pytest

import served
from browser.conftest import PHONE, WIDE, comes
from browser.page_servers import under_a_prefix
from served import Serve
from server.echo_service import EchoService

KEY = "a-key-long-enough-for-the-server"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"score somebody {KEY}\n")
    path.chmod(0o600)
    return serve(api_keys_file=str(path), build=EchoService).http_url


@pytest.fixture
def open_docs(chromium: Any) -> Iterator[Any]:
    """Opens the page at a URL; fails at the end if it logged anything, or asked another host."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_page(url: str, **settings: Any) -> Any:
        contexts.append(context := chromium.new_context(**settings))
        page = context.new_page()
        page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((url, "data:")) or wrong.append(asked.url))
        page.goto(f"{url}/docs")
        page.wait_for_selector(".opblock")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, wrong


def open_operation(page: Any, path: str) -> Any:
    """Opens an operation, and returns its block."""
    page.click(f'[data-path="{path}"]')
    block = page.locator(".opblock.is-open")
    block.get_by_role("button", name="Execute").wait_for()
    return block


@pytest.mark.slow
def test_it_shows_each_path_once_fits_and_sends_the_key_that_authorize_was_given(open_docs: Any, keyed: str) -> None:
    """Resizes one page, because Swagger UI takes seconds to show itself."""
    page = open_docs(keyed, http_credentials={"username": "anybody", "password": KEY})
    paths = page.evaluate("[...document.querySelectorAll('[data-path]')].map((one) => one.dataset.path)")
    assert {"/v2/models/{name}/infer", "/get_reward", "/openapi.json"} <= {*paths}
    assert len(paths) == len({*paths})
    open_operation(page, "/v2/models/{name}/infer")
    for width, height in (WIDE, PHONE):
        page.set_viewport_size({"width": width, "height": height})
        comes(page, lambda width=width: page.evaluate("innerWidth") == width, "the new size")
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.click('[data-path="/v2/models/{name}/infer"]')

    page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
    page.get_by_role("button", name="Authorize").click()
    page.get_by_label("auth-bearer-value").fill(KEY)
    page.locator(".auth-container", has_text="bearer").get_by_role("button", name="Apply credentials").click()
    page.locator(".modal-ux").get_by_role("button", name="Close").last.click()
    with page.expect_request(f"{keyed}/v2") as sent:
        block = open_operation(page, "/v2")
        block.get_by_role("button", name="Execute").click()
    assert sent.value.headers["authorization"] == f"Bearer {KEY}"
    comes(page, lambda: '"guerdon"' in block.locator(".live-responses-table").inner_text(), "the answer")


@pytest.mark.slow
def test_behind_a_proxys_prefix_requests_go_there(open_docs: Any) -> None:
    with served.running(build=EchoService) as server, under_a_prefix(server.http_url, "/rm") as url:
        page = open_docs(url.rstrip("/"))
        block = open_operation(page, "/v2")
        with page.expect_request(f"{url}v2") as sent:
            block.get_by_role("button", name="Execute").click()
        assert sent.value.url == f"{url}v2"
        comes(page, lambda: '"guerdon"' in block.locator(".live-responses-table").inner_text(), "the answer")
