"""What the page shows of a server under load, in a real browser."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import served
from browser.conftest import PHONE, WIDE, Visit, alter, ask_again, comes, until
from browser.page_servers import BREAKS, MARKUP, critic_settings, load, settings, total, train_rows
from guerdon.client import CriticClient, RewardClient
from guerdon.server.runtime import RunningServer
from tiers import slow_but

MODELS = ("reward_model", "longwinded", "fair")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a small checkpoint and of functions under a live load, which keeps samples."""
    config = settings(tmp_path_factory.mktemp("page"), dashboard_samples=True, rewards=[total()])
    with served.running(config=config) as server, load(server.http_url, *MODELS):
        yield server.http_url


@pytest.fixture(scope="module")
def lone_critic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A critic without a reward model that went back to a checkpoint: its steps are 1, 2, 3, 4 and 3."""
    with served.running(config=critic_settings(tmp_path_factory.mktemp("lone"), is_alone=True)) as server:
        with CriticClient(server.http_url) as client:
            for i in range(5):
                if i == 2:
                    saved = client.save()
                if i == 4:
                    assert saved is not None
                    client.load(saved.name)
                client.train(**train_rows(np.random.default_rng(i), 4)).result()
        yield server.http_url


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A critic that was trained for three requests, and restarted after two of them."""
    config = critic_settings(tmp_path_factory.mktemp("critic"))
    with served.running(config=config) as server, CriticClient(server.http_url) as client:
        for i in range(2):
            client.train(**train_rows(np.random.default_rng(i), 4)).result()
    with served.running(config=config) as server:
        with CriticClient(server.http_url) as client:
            client.train(**train_rows(np.random.default_rng(2), 4)).result()
            client.save()
        yield server


def drawn(page: Any, within: str) -> int:
    """The marks of the charts in there; none of them may stand at a place that is no number."""
    assert page.locator("[d*=NaN], [x*=NaN], [y*=NaN], [cx*=NaN], [cy*=NaN], [height*=NaN], [x*=Infinity]").count() == 0
    return page.locator(f"{within} svg[role=application] :is(rect, circle, path.line)").count()


def test_the_numbers_of_a_live_load(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=reward_model")
    until(page, "document.querySelectorAll('.cells rect').length > 10")
    assert page.locator("#server").inner_text().startswith("Ready")
    for tile in ("requests", "tokens", "latency", "fill"):
        comes(page, lambda tile=tile: re.match(r"[\d.]", page.locator(f"#tile-{tile} .value").inner_text()))
    comes(page, lambda: drawn(page, "#rewards") > 40)
    comes(page, lambda: drawn(page, "#traffic") >= 8)
    comes(page, lambda: "ok" in page.locator(".outcomes").inner_text())
    about = page.locator("#models .card", has_text="reward_model").inner_text()
    for fact in ("float32 on cpu", "Version", "Longest", "Why"):
        assert fact in about


@pytest.mark.slow
def test_each_number_tells_of_which_time_it_is(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=reward_model")
    comes(page, lambda: re.match(r"[\d.]", page.locator("#tile-requests .value").inner_text()))
    times = {
        tile: page.locator(f"#tile-{tile} h2 small").inner_text()
        for tile in ("requests", "tokens", "queue", "latency", "saved")
    }
    assert times["requests"] == times["tokens"] != times["latency"]
    assert times["requests"] == "last 1\u00a0min"
    assert (times["latency"], times["saved"]) == ("last 15\u00a0min", "last 15\u00a0min")
    assert times["queue"] == "now"
    assert "since the start" in page.locator("#tile-requests .under").inner_text()
    legend = page.locator("#traffic .card", has_text="Requests").first.locator(".legend")
    comes(page, lambda: re.match(r"all\s*[\d.]+\s*failed", legend.inner_text()))
    assert "last 1\u00a0min" in page.locator("#traffic .card", has_text="Requests").first.inner_text()


@pytest.mark.slow
def test_a_legend_does_not_read_0_between_two_answers(url: str, visit: Visit) -> None:
    def pause(told: dict[str, Any]) -> None:
        """As if each request took longer than a step."""
        lines = told["series"]["models"]["reward_model"]
        for name in ("requests_per_s", "received_tokens_per_s", "queue_sequences"):
            lines[name][-2:] = [0.0, 0.0]
        lines["requests_per_s"][-6:-2] = [3.0] * 4

    page = visit(f"{url}/?model=reward_model", prepare=lambda page: alter(page, pause))
    for title, figure in (
        ("Requests", r"all\s*[1-9.]"),
        ("Tokens", r"received\s*[1-9.]"),
        ("Latency", r"p99\s*[1-9.]"),
    ):
        legend = page.locator("#traffic .card", has_text=title).first.locator(".legend")
        comes(page, lambda legend=legend, figure=figure: re.match(figure, legend.inner_text()), title)


@pytest.mark.slow
def test_a_sum_that_takes_long_is_not_called_healthy(url: str, visit: Visit) -> None:
    def slow(told: dict[str, Any]) -> None:
        told["totals"]["total"]["latency_s"] |= {"p50": 29.5, "p90": 40, "p99": 50}

    with RewardClient(url, model="total") as client:
        client.score(texts=["a", "b"])
    page = visit(f"{url}/?model=total", prepare=lambda page: alter(page, slow))
    page.wait_for_selector("#verdict :text('half take over 29.5')")
    assert page.locator("#verdict h1").inner_text() != "Healthy"


@pytest.mark.slow
def test_a_component_that_only_its_sum_asks_is_not_called_idle(url: str, visit: Visit) -> None:
    def through_the_sum(told: dict[str, Any]) -> None:
        told["totals"]["fair"]["requests"] = {}
        lines = told["series"]["models"]["fair"]
        lines["requests_per_s"] = [value and 0.0 for value in lines["requests_per_s"]]

    page = visit(f"{url}/?model=fair", prepare=lambda page: alter(page, through_the_sum))
    page.wait_for_selector("text=Requests are counted at the sum that contains it")
    assert "idle" not in page.locator("#verdict h1").inner_text()


@pytest.mark.slow
def test_two_sequences_again_and_again_are_no_correlation(url: str, visit: Visit) -> None:
    with RewardClient(url, model="twice") as client:
        client.score(texts=["<", "<< and a longer one"] * 40)
    page = visit(f"{url}/?model=twice")
    page.wait_for_selector("text=Too few different sequences for a correlation (2 of 20)")
    assert "Length predicts" not in page.locator("#verdict").inner_text()
    assert "ρ" not in page.locator("#verdict").inner_text()


@pytest.mark.slow
def test_padding_is_not_called_saving(url: str, visit: Visit) -> None:
    def pad(told: dict[str, Any]) -> None:
        lines = told["series"]["models"]["reward_model"]
        lines["computed_tokens_per_s"] = [v and 1.5 * v for v in lines["received_tokens_per_s"]]

    page = visit(f"{url}/?model=reward_model", prepare=lambda page: alter(page, pad))
    until(page, "document.querySelector('#tile-saved .value').innerText === '−50%'")
    assert re.match(r"[\d.]+k? tokens of padding", page.locator("#tile-saved .under").inner_text())


@pytest.mark.slow
def test_only_the_chosen_models_series_are_asked_for(url: str, visit: Visit) -> None:
    asked: list[str] = []

    def listen(page: Any) -> None:
        page.on("request", lambda request: asked.append(request.url))

    page = visit(f"{url}/?model=reward_model", prepare=listen)
    assert all("model=reward_model" in one for one in asked if "snapshot" in one)
    page.select_option("#model", "longwinded")
    until(page, "!document.querySelector('main').hasAttribute('aria-busy')")
    page.wait_for_selector("text=Length predicts the reward")
    assert "model=longwinded" in [one for one in asked if "snapshot" in one][-1]


@pytest.mark.slow
def test_other_weights_are_a_line_over_the_rewards(url: str, visit: Visit) -> None:
    def swap(told: dict[str, Any]) -> None:
        now = told["server"]["now"]
        told["rewards"]["fair"]["versions"] = [
            {"time": now - 9000, "version": "long-gone"},
            {"time": now - 12, "version": "0123456789abcdef0123"},
        ]

    page = visit(f"{url}/?model=fair", prepare=lambda page: alter(page, swap))
    until(page, "document.querySelectorAll('line.swap').length === 1")
    assert "weights changed" in page.locator("#rewards .legend").first.inner_text()
    page.get_by_role("application", name="Rewards over time").focus()
    read: list[str] = []
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
        read.append(page.locator("#rewards [role=status]").first.text_content())
    assert any("new weights 0123456789abcdef" in text for text in read), read
    assert all("median" in text for text in read if "rewards 0" not in text), "the read-out is said as well"


@pytest.mark.slow
def test_the_numbers_go_on(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=reward_model")
    requests = page.locator("#tile-requests .under")
    before = requests.inner_text()
    until(page, f"document.querySelector('#tile-requests .under').innerText !== {json.dumps(before)}")


@pytest.mark.slow
def test_a_reward_that_grows_with_length_is_told(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=longwinded")
    page.wait_for_selector("text=Length predicts the reward")
    assert "to look at" in page.locator("#verdict h1").inner_text()
    assert "learn to be long" in page.locator("#length").inner_text()


@pytest.mark.slow
def test_a_reward_in_order_is_called_healthy(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=fair")
    until(page, "document.querySelector('#verdict h1').innerText === 'Healthy'")
    assert "Failed requests 0%" in " ".join(page.locator(".checks").inner_text().split())


@pytest.mark.slow
def test_samples_without_a_score_are_told(url: str, visit: Visit) -> None:
    with RewardClient(url, model="broken") as client:
        client.score(texts=[f"{BREAKS} {i}" for i in range(3)])
    page = visit(f"{url}/?model=broken")
    page.wait_for_selector("text=No sample gets a score")


@pytest.mark.slow
def test_another_model_is_chosen_and_kept_in_the_address(url: str, visit: Visit) -> None:
    page = visit(url)
    page.select_option("#model", "fair")
    assert "model=fair" in page.url
    page.reload()
    page.wait_for_selector("body[data-state=live]")
    assert page.input_value("#model") == "fair"


@pytest.mark.slow
def test_this_window_can_be_kept_as_the_reference(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=fair&window=300")
    page.click("#keep")
    until(page, "document.querySelector('#reference').value.includes('-')")
    until(page, "document.querySelector('#rewards').innerText.includes('Same as the reference')")
    page.wait_for_selector("text=part of the reference lies in this window")


def test_the_best_and_the_worst_are_shown_as_text(url: str, visit: Visit) -> None:
    with RewardClient(url, model="marked") as client:
        client.score(texts=[MARKUP, "nothing"])
    page = visit(f"{url}/?model=marked")
    page.click("text=Show samples of this window")
    best = page.locator("#samples ol").first
    best.wait_for()
    assert MARKUP in best.inner_text()
    assert best.locator("img, script").count() == 0
    assert page.evaluate("window.wasRun") is None


@pytest.mark.slow
def test_a_sums_samples_have_their_parts(url: str, visit: Visit) -> None:
    with RewardClient(url, model="total") as client:
        client.score(texts=["<<<<<<<<<<<< a", "b"])
    page = visit(f"{url}/?model=total")
    page.click("text=Show samples of this window")
    best = page.locator("#samples ol").first
    best.wait_for()
    facts = best.locator(".facts").first.inner_text()
    assert re.search(r"fair .?\d\.\d\d · marked 12\.00", facts)
    assert " about " in facts, "functions that read text have no tokens to count"


@pytest.mark.slow
def test_a_samples_long_version_is_broken_into_lines(url: str, visit: Visit) -> None:
    def long_version(route: Any) -> None:
        told = route.fetch().json()
        for one in told["best"]:
            one["weights_version"] = "total=" + 80 * "0"
        route.fulfill(json=told)

    page = visit(
        f"{url}/?model=fair",
        size=PHONE,
        prepare=lambda page: page.route(re.compile(r"/dashboard/samples\?"), long_version),
    )
    page.click("text=Show samples of this window")
    page.locator("#samples ol li").first.wait_for()
    assert 80 * "0" in page.locator("#samples .facts").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


@pytest.mark.slow
def test_a_sum_has_no_tiles_of_what_its_components_compute(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=total")
    headings = ".tile:visible h2"
    assert [text.split()[0] for text in page.locator(headings).all_inner_texts()] == ["Requests", "Latency"]
    page.select_option("#model", "fair")
    comes(page, lambda: page.locator(headings).count() == 6)


def test_responses_are_tried(url: str, visit: Visit) -> None:
    responses = [" yes", f" {MARKUP}"]
    page = visit(url)
    page.select_option("#try-model", "reward_model")
    page.uncheck("#try-template")
    page.fill("#try-prompt", "Is it?")
    for i, text in enumerate(responses):
        page.locator(".response textarea").nth(i).fill(text)
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector(".scored li")
    with RewardClient(url) as client:
        want = client.score(texts=["Is it?" + text for text in responses]).rewards
    shown = [text.replace("\u2212", "-") for text in page.locator(".scored .score").all_inner_texts()]
    assert shown == [f"{reward:.2f}" for reward in want]
    assert MARKUP in page.locator(".scored li").nth(1).inner_text()
    assert page.locator(".scored :is(img, script)").count() == 0
    assert page.locator(".scored .pill").count() == 1, "one is the best"
    assert re.fullmatch(r"\d+ tokens", page.locator(".scored .told").first.inner_text()), "they have no values to read"
    assert "values" not in (page.locator(".heat-text").first.get_attribute("aria-label") or "")
    places = "found => found.map((one) => one.getBoundingClientRect()).map(({ x, width }) => [x, width])"
    for part in (".bar", ".zero"):
        (first, second) = page.locator(f".scored {part}").evaluate_all(places)
        assert first == pytest.approx(second, abs=0.01), "on one scale"


@pytest.mark.slow
def test_the_pages_model_is_tried_and_a_function_has_neither_template_nor_token_count(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=reward_model")
    assert page.input_value("#try-model") == "reward_model"
    assert "chat template" in page.locator("#try").inner_text()
    page.select_option("#model", "fair")
    comes(page, lambda: page.input_value("#try-model") == "fair")
    assert "chat template" not in page.locator("#try").inner_text()
    page.locator(".response textarea").first.fill("Is it?")
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector(".scored li")
    assert page.locator(".scored .facts").first.inner_text().startswith("about ")
    page.select_option("#try-model", "reward_model")
    ask_again(page)
    assert page.input_value("#try-model") == "reward_model", "what was chosen there stays"


def test_a_response_without_a_score_says_why(url: str, visit: Visit) -> None:
    page = visit(url)
    page.select_option("#try-model", "broken")
    page.locator(".response textarea").first.fill(BREAKS)
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector(".scored .failed")
    assert page.locator(".scored .score").inner_text() == "–"


@pytest.mark.slow
def test_a_try_without_a_response_asks_for_one(url: str, visit: Visit) -> None:
    page = visit(url)
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector("text=Write at least one response")


@pytest.mark.slow
def test_none_of_equal_responses_is_the_best(url: str, visit: Visit) -> None:
    page = visit(url)
    page.select_option("#try-model", "broken")
    for i in range(2):
        page.locator(".response textarea").nth(i).fill(f"scored {i}")
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector(".scored li")
    assert page.locator(".scored .score").all_inner_texts() == ["1.00", "1.00"]
    assert page.locator(".scored .pill").count() == 0


@pytest.mark.slow
def test_responses_are_added_and_removed(url: str, visit: Visit) -> None:
    page = visit(url)
    for _ in range(14):
        page.click("text=Add a response")
    assert page.locator(".response").count() == 16
    assert page.get_by_role("button", name="Add a response").is_disabled(), "the server takes no more"
    page.get_by_role("button", name="Remove this response").first.click()
    assert page.locator(".response .field span").all_inner_texts()[-1] == "Response 15"


def test_a_critic_shows_how_it_learns(critic: RunningServer, visit: Visit) -> None:
    page = visit(critic.http_url)
    page.wait_for_selector("#critic:visible")
    assert "at step 3" in page.locator("#critic-state").inner_text()
    lines = page.locator("#critic figure:not(:has-text('queue')) path.line")  # its queue has a line after some seconds
    assert lines.count() == 6, "five charts, one of which has values and returns"
    assert drawn(page, "#critic") >= 6
    unknown = page.locator("#critic figure.is-empty", has_text="Explained variance").inner_text()
    assert "Unknown for these train requests" in unknown, "equal returns have no variance, and no chart"
    path = lines.first.get_attribute("d")
    assert len(re.findall("[ML]", path)) == 3, "the reports from before the restart are shown, too"
    assert "mean value" in page.locator("#critic .legend").nth(2).inner_text()
    assert "step-3" in page.locator("#critic ol").inner_text()


def test_each_token_of_a_critic_has_its_value(critic: RunningServer, visit: Visit) -> None:
    page = visit(critic.http_url)
    page.fill("#try-prompt", "Is it?")
    page.locator(".response textarea").first.fill(" yes it is")
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector(".heat-text")
    assert page.locator(".token:is(.high, .low)").count() == page.locator(".token").count() > 3
    assert page.locator(".token.prompt").count() >= 1
    assert "to read its value" in page.locator(".scored .told").inner_text()
    assert "yes it is" in page.locator(".heat-text").inner_text()
    page.locator(".heat-text").focus()
    page.keyboard.press("ArrowRight")
    assert re.search(r"Token 1, “.*”: .?\d", page.locator(".told").inner_text())


@pytest.mark.slow
def test_a_critic_that_went_back_to_a_checkpoint(lone_critic: str, visit: Visit) -> None:
    page = visit(lone_critic)
    line = "document.querySelector('#critic svg path.line')"
    until(page, f"{line}?.getAttribute('d')")
    path, width = page.evaluate(f"[{line}.getAttribute('d'), {line}.ownerSVGElement.clientWidth]")
    xs = [float(x) for x in re.findall(r"[ML]([-\d.]+) ", path)]
    assert len(xs) == 5
    assert path.count("M") == 2, "the line is broken where the steps go back"
    assert max(xs) <= width
    assert xs[4] == xs[2]


@pytest.mark.slow
def test_a_critic_alone_promises_no_rewards(lone_critic: str, visit: Visit) -> None:
    page = visit(lone_critic)
    assert page.locator("#verdict h1").inner_text() == "Healthy"
    assert "the critic is being trained" in page.locator("#verdict p").inner_text()
    assert not page.locator("#rewards").is_visible()
    assert not page.locator("nav a[href='#rewards']").is_visible()


@pytest.mark.slow
def test_a_server_without_a_critic_shows_none(url: str, visit: Visit) -> None:
    page = visit(url)
    assert not page.locator("#critic").is_visible()
    assert not page.locator("nav a[href='#critic']").is_visible()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", slow_but(("dark",), ["light", "dark"]))
def test_nothing_is_wider_than_the_screen(size: tuple[int, int], scheme: str, url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=longwinded", size=size, color_scheme=scheme)
    until(page, "document.querySelectorAll('.cells rect').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    # The corners of a page that is as light or as dark as was asked for.
    red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert (red > 200) == (scheme == "light")


@pytest.mark.slow
def test_what_the_pointer_and_the_arrow_keys_read(url: str, visit: Visit) -> None:
    page = visit(f"{url}/?model=fair")
    until(page, "document.querySelectorAll('.cells rect').length > 0")
    heat = page.get_by_role("application", name="Rewards over time")
    heat.focus()
    page.keyboard.press("End")
    read_out = page.locator("#rewards .readout").first
    assert "rewards" in read_out.inner_text()
    for _ in range(12):  # the rewards may be some columns back: the time since then depends on the machine
        if "median" in read_out.inner_text():
            break
        page.keyboard.press("ArrowLeft")
    assert "median" in read_out.inner_text()
    page.keyboard.press("Escape")
    assert not read_out.is_visible()
    page.get_by_role("application", name=re.compile("^Requests")).hover()
    page.wait_for_selector("#traffic .readout:visible")
    assert page.locator("#traffic .crosshair").count() >= 4, "the charts over time share their cursor"
