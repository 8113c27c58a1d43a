"""What matters of a teacher, of a judge that compares, and of a judge in words: each kind's own figures."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import judged
import served
import zoo
from browser.conftest import PHONE, WIDE, Visit, ask_again, comes
from guerdon.client import RewardClient, TeacherClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import BudgetConfig, ChatJudgeConfig, ParseConfig
from guerdon.settings.config import JudgeConfig, TeacherConfig
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
