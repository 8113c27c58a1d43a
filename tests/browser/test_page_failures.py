"""What the page shows of samples without a score, of each kind of model: red if all failed, and no praise beside it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import judged
import served
import zoo
from browser.conftest import PHONE, WIDE, Visit, ask_again, comes
from browser.page_servers import BREAKS
from guerdon.client import RewardClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, JudgeConfig, ModelConfig, RewardConfig
from stand_in_judge import KEY, MODEL, stand_in

LONG = " word" * 400
KINDS = {  # a text without a score, and one with
    "checkpoint": (LONG, "short"),
    "broken": (BREAKS, "fine"),
    "total": (BREAKS, "fine"),
    "strict": ("anything", None),
    "careful": ("worth 5 <garbage>", "worth 5"),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
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


@pytest.mark.parametrize(
    ("size", "names"),
    [(WIDE, tuple(KINDS)), pytest.param(PHONE, ("strict", "careful"), marks=pytest.mark.slow)],
    ids=["wide", "phone"],
)
def test_all_failed_and_some(
    size: tuple[int, int], names: tuple[str, ...], server: RunningServer, visit: Visit
) -> None:
    page = visit(server.http_url, size=size)
    for name in names:
        bad, good = KINDS[name]
        with RewardClient(server.http_url, model=name) as client:
            assert np.isnan(client.score(texts=[bad] * 4).rewards).all()
            page.goto(f"{server.http_url}/?model={name}")
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


def test_another_model_that_fails_is_told_beside_a_healthy_one(server: RunningServer, visit: Visit) -> None:
    with RewardClient(server.http_url, model="checkpoint") as client:
        client.score(texts=["short"])
    with RewardClient(server.http_url, model="strict") as client:
        client.score(texts=["anything"] * 3)
    page = visit(f"{server.http_url}/?model=checkpoint")
    found = page.locator("#verdict .findings a", has_text="strict loses samples")
    comes(page, lambda: ask_again(page) or found.is_visible())
    assert "without a score in this window: 100% of 3 by strict" in found.inner_text()
    with RewardClient(server.http_url, model="broken") as client:
        client.score(texts=[BREAKS, "fine"])
    more = page.locator("#verdict .findings a", has_text="2 other models lose samples")
    comes(page, lambda: ask_again(page) or more.is_visible())
    assert "100% of 3 by strict, 50% of 2 by broken" in more.inner_text()
    more.click()
    comes(page, lambda: page.locator("#model").input_value() == "strict")
