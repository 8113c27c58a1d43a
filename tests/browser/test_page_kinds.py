"""What the page shows of each kind of model: its figures, and samples without a score."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import judged
import served
import zoo
from browser.conftest import PHONE, WIDE, Visit, ask_again, comes
from browser.page_servers import BREAKS
from guerdon.client import RewardClient, TeacherClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import BudgetConfig, ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, JudgeConfig, ModelConfig, RewardConfig, TeacherConfig
from served import Serve
from stand_in_judge import KEY, MODEL, stand_in


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A teacher, a judge that compares, and a judge in words."""
    folder: Path = tmp_path_factory.mktemp("kinds")
    model = str(zoo.tokenizer(zoo.language_model("mixtral", folder / "model")))
    (folder / "key").write_text(KEY)
    with stand_in() as remote:
        careful = ChatJudgeConfig(
            name="careful", url=remote.url, model=MODEL, template="{response}", cache=str(folder / "answers"),
            api_key_file=str(folder / "key"), parse=ParseConfig(regex=r"Score: (\S+)"), parse_retries=1,
            prompt_price=1000.0, completion_price=5000.0, budget=BudgetConfig(calls=50),
        )  # fmt: skip
        rubric = judged.write(folder, judged.COMPARING)
        pairs = JudgeConfig(model=model, name="pairs", rubric=rubric, max_other_mass=1.0)
        models = [TeacherConfig(model=model), pairs, careful]
        with served.running(*models) as server:
            yield server


@pytest.mark.slow
def test_a_judge_that_compares_shows_apart_how_often_its_orders_disagree(server: RunningServer, visit: Visit) -> None:
    with RewardClient(server.http_url, model="pairs") as client:
        told = client.score(texts=judged.TEXTS[:2], prompts=judged.PROMPTS[:2])
    assert told.attributes is not None
    page = visit(f"{server.http_url}/?model=pairs")
    page.wait_for_selector("#components:visible")
    figures = page.locator("#components figure:visible")
    assert "disagreed" not in "".join(figures.filter(has_text="Mean").all_inner_texts()), "it is no criterion"
    shown = figures.filter(has_text="Orders disagree").locator(".legend b").inner_text()
    assert float(shown.strip("%")) == pytest.approx(100 * told.attributes[:, 3].mean(), abs=0.6)
    assert figures.filter(has_text="Mass on no label").count() == 1


def test_a_teachers_entropy_is_shown_if_clients_ask_for_it(server: RunningServer, visit: Visit) -> None:
    page = visit(f"{server.http_url}/?model=teacher")
    entropy = page.locator("#components figure", has_text="Entropy")
    with TeacherClient(server.http_url) as client:
        client.logprobs(tokens=[[5, 6, 7, 8]])
        comes(page, lambda: ask_again(page) or page.locator("#components").is_visible())
        assert not entropy.is_visible()
        (told,) = client.logprobs(tokens=[[5, 6, 7, 8, 9]], entropy=True).entropy or []
    comes(page, lambda: ask_again(page) or entropy.is_visible())
    assert float(entropy.locator(".legend b").inner_text()) == pytest.approx(np.mean(told), abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_judge_in_words_shows_its_calls_and_no_batches(
    size: tuple[int, int], server: RunningServer, visit: Visit
) -> None:
    with RewardClient(server.http_url, model="careful") as client:
        client.score(texts=["worth 3", "worth 4", "worth 5 <garbage>"])  # the last is asked twice, in vain
        client.score(texts=["worth 3"])
    page = visit(f"{server.http_url}/?model=careful", size=size)
    comes(page, lambda: page.locator("#calls").is_visible())
    told = " ".join(page.locator("#calls").inner_text().split())
    assert re.search(r"answered 4 100%", told)
    assert re.search(r"mean time of a call [\d.]+ m?s calls in progress 0", told)
    assert re.search(r"answers kept, not asked for again [1-9]", told)
    assert "answers without a verdict 2 " in told or "answers without a verdict 4 " in told
    assert "tokens of prompts 400 tokens of answers 40 cost, in the prices' currency 0.6 budget used" in told
    headings = [text.split()[0] for text in page.locator(".tile:visible h2").all_inner_texts()]
    assert headings == ["Requests", "Queue", "Latency"]
    assert page.locator("#traffic figure:visible h3", has_text=re.compile("^(Tokens|Batches)")).count() == 0
    about = page.locator("#models .card", has_text="careful").inner_text()
    assert "another server's model" in about and "Weights" not in about
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.select_option("#model", "teacher")
    page.wait_for_selector("#calls", state="hidden")


PROMPT, RESPONSE = "in the thing", " on a"


@pytest.fixture(scope="module")
def teachers_server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
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


def test_a_teacher_has_traffic_and_no_rewards(teachers_server: RunningServer, visit: Visit) -> None:
    with TeacherClient(teachers_server.http_url) as client:
        client.top(5, texts=[PROMPT + RESPONSE] * 4)
    page = visit(f"{teachers_server.http_url}/?model=teacher")
    comes(page, lambda: page.locator("#verdict h1").inner_text() == "Healthy")
    assert not page.locator("#rewards").is_visible() and not page.locator("nav a[href='#rewards']").is_visible()
    assert "reward" not in page.locator("#verdict").inner_text()
    comes(page, lambda: "tokens for the size of answers" in page.locator("#tile-saved .under").inner_text())
    assert "logprobs" in page.locator("#models .card", has_text="bare").inner_text()


@pytest.mark.parametrize("size", [None, pytest.param(PHONE, marks=pytest.mark.slow)])
def test_each_token_has_its_logprob_and_what_was_likeliest(
    size: tuple[int, int] | None, teachers_server: RunningServer, visit: Visit
) -> None:
    page = visit(teachers_server.http_url, **({} if size is None else {"size": size}))
    page.select_option("#try-model", "teacher")
    assert page.locator("#try .results").inner_text() == "Log-probs appear here."
    page.uncheck("#try-template")
    page.fill("#try-prompt", PROMPT)
    page.locator(".response textarea").first.fill(RESPONSE)
    score(page)
    with TeacherClient(teachers_server.http_url) as client:
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


@pytest.mark.slow
def test_ids_may_be_tried(teachers_server: RunningServer, visit: Visit) -> None:
    page = visit(teachers_server.http_url)
    page.select_option("#try-model", "bare")
    assert page.is_checked("#try-ids") and page.is_disabled("#try-ids")
    assert not page.locator("#try-template").is_visible()
    page.fill("#try-prompt", "[5, 6, 7]")
    page.locator(".response textarea").first.fill("8 9 10")
    score(page)
    with TeacherClient(teachers_server.http_url, "bare") as client:
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


LONG = " word" * 400
KINDS = {  # a text without a score, and one with
    "checkpoint": (LONG, "short"),
    "broken": (BREAKS, "fine"),
    "total": (BREAKS, "fine"),
    "strict": ("anything", None),
    "careful": ("worth 5 <garbage>", "worth 5"),
}


@pytest.fixture
def failures_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A reward model, a function, a sum of it, a judge whose labels are never likely enough, and one in words."""
    (tmp_path / "key").write_text(KEY)
    judge = str(zoo.tokenizer(zoo.language_model("llama", tmp_path / "judge")))
    with stand_in() as remote:
        models = [
            ModelConfig(model=str(served.reward_model(tmp_path / "rm")), name="checkpoint"),
            ModelConfig(model="browser.page_servers:broken", name="broken"),
            JudgeConfig(
                model=judge, name="strict", rubric=judged.write(tmp_path, judged.RUBRIC.replace("Q: {prompt}", "")),
                max_other_mass=0.0,
            ),
            ChatJudgeConfig(
                name="careful", url=remote.url, model=MODEL, template="{response}", cache=str(tmp_path / "answers"),
                api_key_file=str(tmp_path / "key"), parse=ParseConfig(regex=r"Score: (\S+)"), parse_retries=0,
            ),
        ]  # fmt: skip
        total = RewardConfig(name="total", components=[ComponentConfig("broken")])
        with served.running(*models, rewards=[total]) as running_server:
            yield running_server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"),
    [(WIDE, tuple(KINDS)), pytest.param(PHONE, ("strict", "careful"), marks=pytest.mark.slow)],
    ids=["wide", "phone"],
)
def test_all_failed_and_some(
    size: tuple[int, int], names: tuple[str, ...], failures_server: RunningServer, visit: Visit
) -> None:
    page = visit(failures_server.http_url, size=size)
    for name in names:
        bad, good = KINDS[name]
        with RewardClient(failures_server.http_url, model=name) as client:
            assert np.isnan(client.score(texts=[bad] * 4).rewards).all()
            page.goto(f"{failures_server.http_url}/?model={name}")
            verdict = page.locator("#verdict")
            comes(page, lambda: ask_again(page) or "No sample gets a score" in verdict.inner_text())  # noqa: B023
            assert "bad" in (verdict.get_attribute("class") or "") and page.title().startswith("Something is wrong")
            said = " ".join(page.locator("main").inner_text().split())
            assert "Failed samples 4 (100%)" in said and "4 of 4 samples failed" in said
            assert "4 samples got no score" in said and "with the first request" not in said
            assert "finite" not in said and "Healthy" not in said
            if page.locator("#tile-saved").is_visible():
                assert page.locator("#tile-saved .value").inner_text() == "–"
            assert "Samples failed 4 100%" in " ".join(page.locator(".outcomes").first.inner_text().split())
            assert page.locator("#errors tbody tr").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "nothing is beyond the screen"
            if good is not None:
                client.score(texts=[good] * 16)
                comes(page, lambda: ask_again(page) or "4 samples without a score" in verdict.inner_text())  # noqa: B023
                assert "bad" in (verdict.get_attribute("class") or "")
                said = " ".join(page.locator("main").inner_text().split())
                assert "Failed samples 4 (20%)" in said and "4 samples without one" in said


@pytest.mark.slow
def test_another_model_that_fails_is_told_beside_a_healthy_one(failures_server: RunningServer, visit: Visit) -> None:
    with RewardClient(failures_server.http_url, model="checkpoint") as client:
        client.score(texts=["short"])
    with RewardClient(failures_server.http_url, model="strict") as client:
        client.score(texts=["anything"] * 3)
    page = visit(f"{failures_server.http_url}/?model=checkpoint")
    found = page.locator("#verdict .findings a", has_text="strict loses samples")
    comes(page, lambda: ask_again(page) or found.is_visible())
    assert "without a score in this window: 100% of 3 by strict" in found.inner_text()
    with RewardClient(failures_server.http_url, model="broken") as client:
        client.score(texts=[BREAKS, "fine"])
    more = page.locator("#verdict .findings a", has_text="2 other models lose samples")
    comes(page, lambda: ask_again(page) or more.is_visible())
    assert "100% of 3 by strict, 50% of 2 by broken" in more.inner_text()
    more.click()
    comes(page, lambda: page.locator("#model").input_value() == "strict")
