"""What the page shows of teachers: their traffic, and in Try it each token's log-prob and what was likelier."""

from pathlib import Path
from typing import Any

import pytest

import served
import zoo
from browser.conftest import PHONE, Visit, comes
from guerdon.client import TeacherClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from served import Serve

PROMPT, RESPONSE = "in the thing", " on a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    """A teacher with a tokenizer and one without, beside a reward model."""
    folder: Path = tmp_path_factory.mktemp("teachers")
    models: list[Any] = [
        TeacherConfig(model=str(zoo.tokenizer(zoo.language_model("llama", folder / "teacher")))),
        TeacherConfig(model=str(zoo.language_model("llama", folder / "bare")), name="bare"),
        ModelConfig(model=str(served.reward_model(folder / "rm"))),
    ]
    return serve(*models)


def score(page: Any) -> None:
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector(".scored li")


def figures(page: Any) -> list[str]:
    return [text.replace("\u2212", "-") for text in page.locator(".scored .parts dd").all_inner_texts()]


def test_a_teacher_has_traffic_and_no_rewards(server: RunningServer, visit: Visit) -> None:
    with TeacherClient(server.http_url) as client:
        client.top(5, texts=[PROMPT + RESPONSE] * 4)
    page = visit(f"{server.http_url}/?model=teacher")
    comes(page, lambda: page.locator("#verdict h1").inner_text() == "Healthy")
    assert not page.locator("#rewards").is_visible() and not page.locator("nav a[href='#rewards']").is_visible()
    assert "reward" not in page.locator("#verdict").inner_text()
    comes(page, lambda: "tokens for the size of answers" in page.locator("#tile-saved .under").inner_text())
    assert "logprobs" in page.locator("#models .card", has_text="bare").inner_text()


@pytest.mark.parametrize("size", [None, PHONE])
def test_each_token_has_its_logprob_and_what_was_likeliest(
    size: tuple[int, int] | None, server: RunningServer, visit: Visit
) -> None:
    page = visit(server.http_url, **({} if size is None else {"size": size}))
    page.select_option("#try-model", "teacher")
    assert page.locator("#try .results").inner_text() == "Log-probs appear here."
    page.uncheck("#try-template")
    page.fill("#try-prompt", PROMPT)
    page.locator(".response textarea").first.fill(RESPONSE)
    score(page)
    with TeacherClient(server.http_url) as client:
        own = client.top(5, texts=[PROMPT + RESPONSE])
        (response,) = client.logprobs(responses=[RESPONSE], prompts=[PROMPT]).logprobs or []
    assert own.logprobs is not None and own.top_logprobs is not None
    assert figures(page) == [f"{response.sum():.2f}", f"{response.mean():.2f}"]
    tokens = page.locator(".token")
    assert tokens.count() == len(own.logprobs[0]) + 1 and page.locator(".token.prompt").count() == tokens.count() - len(
        response
    )
    assert page.locator(".scored .score").inner_text() == "" and page.locator(".scored .failed").inner_text() == ""
    tokens.last.hover()
    told = page.locator(".told").inner_text().replace("\u2212", "-")
    assert f": {own.logprobs[0][-1]:.3f}, rank " in told
    shown = page.locator(".likeliest tbody tr td:nth-child(2)").all_inner_texts()
    assert [text.replace("\u2212", "-") for text in shown] == [f"{value:.3f}" for value in own.top_logprobs[0][-1]]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing stands beside the page"
    page.locator(".heat-text").focus()
    for _ in range(tokens.count()):
        page.keyboard.press("ArrowLeft")
    assert "nothing predicts it" in page.locator(".told").inner_text()
    assert page.locator(".likeliest table").count() == 0


def test_ids_may_be_tried(server: RunningServer, visit: Visit) -> None:
    page = visit(server.http_url)
    page.select_option("#try-model", "bare")
    assert page.is_checked("#try-ids") and page.is_disabled("#try-ids")
    assert not page.locator("#try-template").is_visible()
    page.fill("#try-prompt", "[5, 6, 7]")
    page.locator(".response textarea").first.fill("8 9 10")
    score(page)
    with TeacherClient(server.http_url, "bare") as client:
        (response,) = client.logprobs(tokens=[[5, 6, 7, 8, 9, 10]], prompt_lengths=[3]).logprobs or []
    assert figures(page) == [f"{response.sum():.2f}", f"{response.mean():.2f}"]
    assert page.locator(".heat-text").inner_text().split() == ["5", "6", "7", "8", "9", "10"]
    page.select_option("#try-model", "reward_model")
    assert page.is_enabled("#try-ids") and not page.is_checked("#try-ids")
    page.check("#try-ids")
    assert not page.locator("#try-template").is_visible()
    score(page)
    comes(page, lambda: page.locator(".scored .score").inner_text() != "")
    page.fill("#try-prompt", "five")
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector("text=Write token ids")
