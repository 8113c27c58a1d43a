"""What the page offers beside its figures: lines to connect with, components, errors, another model, zoom and files."""

import contextlib
import csv
import io
import random
import re
import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import judged
import served
import zoo
from browser.conftest import PHONE, WIDE, Visit, alter, ask_again, comes, leave, until
from browser.page_servers import BREAKS, critic_settings, settings, texts, total
from guerdon.client import RewardClient, TeacherClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import JudgeConfig, TeacherConfig
from server.keys import KEYS, keyed
from tiers import slow_but


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Functions, a sum of two of them, teachers and judges; only the sum has been asked."""
    folder: Path = tmp_path_factory.mktemp("panels")
    model = str(zoo.tokenizer(zoo.language_model("llama", folder / "teacher")))
    config = settings(None, rewards=[total()])
    for name in ("teacher", "reference"):
        config.models.append(TeacherConfig(model=model, name=name))
    for name in ("judge", "strict"):
        judge = JudgeConfig(model=model, name=name, rubric=judged.write(folder), max_other_mass=1.0)
        config.models.append(judge)
    with served.running(config=config) as server:
        with RewardClient(server.http_url, model="total") as client:
            client.score(texts=[f"{i} " + "<" * (i % 4) for i in range(200)])
        yield server


def lines(page: Any) -> dict[str, str]:
    """The panel's lines by the tab that shows them."""
    told = {}
    for tab in page.get_by_role("tab").all():
        tab.click()
        told[tab.inner_text()] = page.locator("#connect code").inner_text()
    return told


def run_curl(command: str) -> Any:
    """What the command would be answered."""
    name, *words = shlex.split(command.replace("\\\n", ""))
    assert (name, words.pop(0)) == ("curl", "-s")
    headers, url, body = {}, "", ""
    while words:
        word = words.pop(0)
        if word == "-H":
            key, _, value = words.pop(0).partition(": ")
            headers[key] = value
        elif word == "-d":
            body = words.pop(0)
        else:
            url = word
    response = httpx.post(url, headers=headers, content=body)
    assert response.status_code == 200, response.text
    return response.json()


def run_python(code: str) -> str:
    """What the code prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "connect", "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize("model", slow_but(("fair", "teacher"), ["fair", "total", "longwinded", "teacher", "judge"]))
def test_the_lines_of_an_idle_model_ask_it(model: str, server: RunningServer, visit: Visit) -> None:
    def idle(told: dict[str, Any]) -> None:
        for name, one in told["series"]["models"].items():
            told["series"]["models"][name] = {key: [0.0] * len(values) for key, values in one.items()}

    page = visit(f"{server.http_url}/?model={model}", prepare=lambda page: alter(page, idle))
    page.wait_for_selector("#connect:visible")
    told = lines(page)
    assert all(server.http_url in code for code in told.values())
    answer, printed = str(run_curl(told["curl"])), run_python(told["Python"])
    assert "error" not in answer
    assert re.search(r"\d\.\d", answer) and re.search(r"\d\.", printed)
    assert ("TRL" in told) == (model != "longwinded"), "its trainer sends texts"
    if "TRL" in told:
        compile(told["TRL"], "trl", "exec")
    if "OpenRLHF" in told:
        words = shlex.split(told["OpenRLHF"].replace("\\\n", ""))
        url = words[words.index("--reward.remote_url") + 1]
        assert httpx.post(url, json={"query": ["a"], "prompts": [""]}).json()["rewards"]


@pytest.mark.slow
def test_a_critics_lines_ask_it(tmp_path: Path, visit: Visit) -> None:
    with served.running(config=critic_settings(tmp_path, is_alone=True)) as server:
        page = visit(server.http_url)
        told = lines(page)
        assert len(run_curl(told["curl"])["outputs"]) >= 1
        assert re.search(r"\d\.", run_python(told["Python"]))
        compile(told["TRL"], "trl", "exec")
        assert f'use_critic(trainer, "{server.http_url}")' in told["TRL"]
        assert f"--critic.model_name_or_path {server.http_url}" in told["OpenRLHF"]
        leave(page)


@pytest.mark.slow
def test_the_panel_is_used_by_the_keyboard_and_goes_with_the_first_request(server: RunningServer, visit: Visit) -> None:
    page = visit(f"{server.http_url}/?model=twice", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("tab", name="curl").focus()
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("tab", selected=True).inner_text() == "OpenRLHF"
    assert page.evaluate("document.activeElement.textContent") == "OpenRLHF"
    assert page.get_by_role("tabpanel").get_attribute("aria-labelledby") == page.evaluate("document.activeElement.id")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#connect code").text_content()
    with RewardClient(server.http_url, model="twice") as client:
        client.score(texts=["<"])
    comes(page, lambda: ask_again(page) or not page.locator("#connect").is_visible())


@pytest.mark.slow
def test_lines_for_a_server_with_keys_take_them_from_the_environment(tmp_path: Path, visit: Visit) -> None:
    with served.running(config=keyed(tmp_path, grpc_port=None, models=settings(None).models)) as server:
        page = visit(f"{server.http_url}/?model=fair", http_credentials={"username": "x", "password": KEYS["score"]})
        told = lines(page)
        assert "GUERDON_API_KEY" in page.locator("#connect .aside").inner_text()
        answer = run_curl(told["curl"].replace("$GUERDON_API_KEY", KEYS["score"]))
        assert len(answer["rewards"]) == 2
        assert KEYS["score"] not in page.content()
        leave(page)


def test_a_sum_shows_its_components(server: RunningServer, visit: Visit) -> None:
    page = visit(f"{server.http_url}/?model=total")
    page.wait_for_selector("#components:visible")
    assert page.locator("#components-title").inner_text() == "Components"
    mean, spread, share = page.locator("#components figure:visible .legend").all_inner_texts()
    assert re.search(r"fair\s*[−\d.]+\s*marked\s*1\.\d\d", mean)
    assert re.search(r"fair\s*1\.\d+\s*marked\s*1\.\d+", spread)
    parts = [int(part) for part in re.findall(r"(\d+)%", share)]
    assert len(parts) == 2 and sum(parts) == pytest.approx(100, abs=1)


def test_a_judge_shows_its_criteria_and_a_teacher_its_logprobs(server: RunningServer, visit: Visit) -> None:
    with RewardClient(server.http_url, model="strict") as client:
        told = client.score(texts=judged.TEXTS, prompts=judged.PROMPTS)
    assert told.attributes is not None
    with TeacherClient(server.http_url, "reference") as teacher:
        (logprobs,) = teacher.logprobs(tokens=[[5, 6, 7, 8, 9]]).logprobs or []
    page = visit(f"{server.http_url}/?model=strict")
    page.wait_for_selector("#components:visible")
    assert page.locator("nav a[href='#components']").inner_text() == "Criteria"
    legend = page.locator("#components figure:visible .legend").first.inner_text().replace("−", "-")
    assert re.findall(r"-?\d\.\d\d", legend) == [f"{value:.2f}" for value in told.attributes.mean(axis=0)[:3]]
    mass = page.locator("#components figure", has_text="Mass on no label").locator(".legend b").inner_text()
    assert float(mass.strip("%")) == pytest.approx(100 * told.attributes[:, 3].mean(), abs=0.6)
    page.select_option("#model", "reference")
    until(page, "document.querySelector('#components-title').textContent === 'Log-probs'")
    shown = page.locator("#components figure:visible .legend b").first.inner_text().replace("−", "-")
    assert shown == f"{logprobs.mean():.2f}"
    assert page.locator("#components figure:visible").count() == 2, "it has neither shares nor labels"


@pytest.mark.slow
def test_recent_errors_are_shown_by_kind(server: RunningServer, visit: Visit) -> None:
    page = visit(f"{server.http_url}/?model=broken")
    assert not page.locator("#errors").is_visible()
    with RewardClient(server.http_url, model="broken") as client:
        client.score(texts=[f"{BREAKS} {i}" for i in range(3)] + ["fine"])
    httpx.post(f"{server.http_url}/v2/models/broken/infer", content=b"{nonsense")
    comes(page, lambda: ask_again(page) or page.locator("#errors tbody tr").count() == 2)
    rows = [" ".join(row.inner_text().split()) for row in page.locator("#errors tbody tr").all()]
    assert re.fullmatch(r"SampleFailed a sample 3 .+ ago in the answer The model gave no score .*", rows[0])
    assert re.fullmatch(r"InvalidRequest a whole request 1 .+ ago 400 The request is wrong.*", rows[1])
    assert BREAKS not in page.locator("#errors").inner_text()
    assert "Failed samples 3 (75%)" in page.locator("#verdict p").inner_text()
    assert "Latency" in page.locator("#verdict p").inner_text()
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    last = page.locator("#errors thead th", has_text="Last")
    comes(
        page,
        lambda: last.bounding_box()["x"] + last.bounding_box()["width"] <= PHONE[0],
        "how many and when, unscrolled",
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_two_models_are_on_one_chart(size: tuple[int, int], server: RunningServer, visit: Visit) -> None:
    page = visit(f"{server.http_url}/?model=total&beside=marked", size=size)
    with RewardClient(server.http_url, model="marked") as client:
        client.score(texts=["<<", "<"] * 4)
    comes(page, lambda: ask_again(page) or re.search(r"marked\s*mean 1\.", page.locator("#beside").inner_text()))
    assert page.locator("#beside path.line").count() == 6
    requests = page.locator("#traffic .card", has_text="Requests").first.locator(".legend")
    assert re.search(r"all\s*[\d.]+\s*failed\s*[\d.]+\s*marked\s*[\d.]+", requests.inner_text())
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.select_option("#other", "")
    until(page, "!location.search.includes('beside') && document.querySelector('#beside').hidden")


@pytest.mark.slow
def test_an_earlier_version_may_be_the_reference(server: RunningServer, visit: Visit) -> None:
    changes: list[dict[str, Any]] = []

    def swap(told: dict[str, Any]) -> None:
        changes.append({"time": told["server"]["now"] + 11, "version": "0123456789abcdef"})
        told["rewards"]["total"]["versions"] = changes[:1]

    page = visit(f"{server.http_url}/?model=total", prepare=lambda page: alter(page, swap))
    option = page.locator("#reference option", has_text="first version")
    page.select_option("#reference", option.get_attribute("value"))
    until(page, "document.querySelector('#rewards').innerText.includes('Same as the reference')")
    assert page.input_value("#reference") in page.url


def times(page: Any) -> tuple[str, str]:
    """The two ends of the range that the page is zoomed to."""
    page.wait_for_selector("#zoomed:visible")
    found = re.search(r"Zoomed to ([\d:]+) – ([\d:]+)", page.locator("#zoomed").inner_text())
    assert found is not None
    return found[1], found[2]


def seconds(ends: tuple[str, str]) -> float:
    start, end = (datetime.strptime(time, "%H:%M:%S") for time in ends)
    return (end - start).total_seconds() % 86_400


@pytest.mark.slow
def test_dragging_zooms_and_a_button_goes_back(server: RunningServer, visit: Visit) -> None:
    nows: list[float] = []

    def long_ago(told: dict[str, Any]) -> None:
        told["server"]["started"] -= 3000  # so that the axis is as long as the window
        nows.append(told["server"]["now"])

    page = visit(f"{server.http_url}/?model=total&window=900", prepare=lambda page: alter(page, long_ago))
    chart = page.locator("#traffic svg[role=application]").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    width, y = box["width"] - 64, box["y"] + 60  # without the margins
    page.mouse.move(box["x"] + 54 + width * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 54 + width * 0.75, y, steps=3)
    assert float(page.locator("#traffic .chosen").first.get_attribute("width")) == pytest.approx(width / 2, abs=3)
    page.mouse.up()
    assert seconds(times(page)) == pytest.approx(450, abs=15)
    asked = re.search(r"window=\d+&until=(\d+)", page.url)
    assert asked is not None
    assert nows[0] - 245 < int(asked[1]) < nows[-1] - 205, "it ends at three quarters of the window"
    until(page, "!document.querySelector('main').hasAttribute('aria-busy')")
    assert "whole range" in page.locator("#tile-latency").inner_text()
    page.reload()
    assert seconds(times(page)) == pytest.approx(450, abs=15), "the address keeps it"
    page.get_by_role("button", name="Back to the last 15 minutes").click()
    page.wait_for_selector("#zoomed", state="hidden")
    assert page.input_value("#window") == "900"
    assert "until" not in page.url


@pytest.mark.slow
def test_enter_at_both_ends_zooms_as_well(server: RunningServer, visit: Visit) -> None:
    def long_ago(told: dict[str, Any]) -> None:
        told["server"]["started"] -= 3000

    page = visit(f"{server.http_url}/?model=total&window=900", prepare=lambda page: alter(page, long_ago))
    chart = page.get_by_role("application", name=re.compile("^Requests"))
    chart.focus()
    for key in ("Home", "Enter", *["PageDown"] * 3):
        page.keyboard.press(key.replace("PageDown", "PageUp"))
    assert "From" not in page.locator("#traffic [role=status]").first.text_content()
    page.keyboard.press("Enter")
    assert 80 <= seconds(times(page)) <= 130, "30 steps of 3 or 4 seconds"


def test_a_chart_is_saved_as_csv_and_png(server: RunningServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(f"{server.http_url}/?model=total", size=PHONE, color_scheme="dark")
    page.wait_for_selector("#components:visible")
    menu = page.locator("#components figure", has_text="Share").locator(".save")
    assert menu.locator("summary").get_attribute("aria-label") == "Save Share"
    for kind in ("CSV", "PNG"):
        menu.locator("summary").click()
        with page.expect_download() as download:
            menu.get_by_role("button", name=kind).click()
        name = download.value.suggested_filename
        assert name == f"total-share.{kind.lower()}"
        download.value.save_as(tmp_path / name)
        assert menu.get_attribute("open") is None
    head, *rows = list(csv.reader((tmp_path / "total-share.csv").read_text().splitlines()))
    assert head == ["time", "fair", "marked"]
    (filled,) = [row for row in rows if row[1]]
    assert float(filled[1]) + float(filled[2]) == pytest.approx(1, abs=0.01)
    datetime.fromisoformat(filled[0])
    picture = (tmp_path / "total-share.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[i : i + 4], "big") for i in (16, 20))
    assert width > 600 and height > 300


@pytest.mark.slow
def test_numbers_of_every_chart_can_be_saved(server: RunningServer, visit: Visit) -> None:
    with RewardClient(server.http_url, model="fair") as client:
        client.score(texts=texts(random.Random(0), 60))
    page = visit(f"{server.http_url}/?model=fair")
    until(page, "document.querySelectorAll('.cells rect').length > 0")
    for menu in page.locator("figure:not(.is-empty) .save:visible").all():
        menu.locator("summary").click()
        with page.expect_download() as download:
            menu.get_by_role("button", name="CSV").click()
        head, *rows = list(csv.reader(Path(download.value.path()).read_text().splitlines()))
        assert rows, download.value.suggested_filename
        assert {len(row) for row in rows} == {len(head)}


@pytest.mark.slow
def test_cells_of_a_csv_file_are_quoted(server: RunningServer, visit: Visit) -> None:
    page = visit(server.http_url)
    table = {"head": ["a,b", 'say "x"'], "rows": [[1.5, None], ["line\nbreak", 0]]}
    told = page.evaluate("async (table) => (await import('/dashboard/save.js')).csv(table)", table)
    assert list(csv.reader(io.StringIO(told))) == [["a,b", 'say "x"'], ["1.5", ""], ["line\nbreak", "0"]]
