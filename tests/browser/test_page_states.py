"""The page before there is anything to show, and when its server does not answer, or not to it."""

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import served
from browser.conftest import PHONE, WIDE, Visit, alter, ask_again, comes, leave, until
from browser.page_servers import settings, under_a_prefix
from guerdon.settings.config import ModelConfig
from ports import free_port
from served import Serve
from server.keys import KEYS, keyed
from tiers import slow_but

NO_ANSWER = ("Failed to load resource",)
"""What the browser itself says of an answer that does not come, or that is an error."""


@pytest.fixture(scope="module")
def idle(serve: Serve) -> str:
    """A server that nobody asks."""
    return serve(config=settings(None)).http_url


def forward(page: Any, seconds: int) -> None:
    """Lets the page's clock go on, second by second, so that it asks and is refused meanwhile."""
    for _ in range(seconds):
        page.clock.run_for(1000)
        time.sleep(0.02)


def with_a_clock(page: Any) -> None:
    page.clock.install()


def hold_the_clock(page: Any) -> None:
    """From now on it goes on by `forward` alone, however busy this machine is."""
    page.clock.pause_at(datetime.fromtimestamp(page.evaluate("Date.now()") / 1000 + 0.5, UTC))


def test_an_idle_server_says_so(idle: str, visit: Visit) -> None:
    page = visit(idle)
    assert page.locator("#verdict h1").inner_text() == "Ready, and idle"
    assert "appear here with the first request" in page.locator("#rewards").inner_text()
    assert "--dashboard-samples" in page.locator("#samples").inner_text()
    assert page.locator("#traffic").inner_text().count("Nothing in this window") >= 1
    assert page.title().startswith("Ready, and idle")


@pytest.mark.slow
def test_a_server_whose_first_request_waits_is_not_idle(idle: str, visit: Visit) -> None:
    def wait(told: dict[str, Any]) -> None:
        for lines in told["series"]["models"].values():
            lines["queue_sequences"][-1] = 8.0

    page = visit(idle, prepare=lambda page: alter(page, wait))
    assert page.locator("#verdict h1").inner_text() == "Ready, and busy"
    assert "8 sequences waiting for longwinded" in page.locator("#verdict").inner_text()


LONG_NAME = "a_reward_model_with_a_rather_long_name_of_which_nothing_may_be_hidden"


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_is_written_under_a_pill(size: tuple[int, int], visit: Visit) -> None:
    config = settings(None)
    config.models = [ModelConfig(model="browser.page_servers:fair", name=name) for name in ("short", LONG_NAME)]
    with served.running(config=config) as server:
        page = visit(server.http_url, size=size)
        page.wait_for_selector(f"#models :text('{LONG_NAME}')")
        under = page.evaluate(
            """() => {
              const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
              const texts = [];
              for (let node = walker.nextNode(); node; node = walker.nextNode()) {
                if (node.parentElement.closest("select, .hidden")) continue;
                const range = document.createRange();
                range.selectNodeContents(node);
                for (const at of range.getClientRects()) texts.push([node, at]);
              }
              const isOver = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
              return [...document.querySelectorAll("main .pill")].flatMap((pill) =>
                texts.filter(([node, at]) => !pill.contains(node) && isOver(pill.getBoundingClientRect(), at))
                  .map(([node]) => node.textContent));
            }"""
        )
        assert under == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.locator("#models .pill").count() == 2
        leave(page)  # else it asks a server that has stopped


@pytest.mark.slow
def test_it_says_that_it_asks_until_the_first_answer(idle: str, visit: Visit) -> None:
    held: list[Any] = []
    page = visit(
        idle, "loading", prepare=lambda page: page.route("**/dashboard/snapshot*", lambda route: held.append(route))
    )
    shown = page.evaluate("getComputedStyle(document.querySelector('#verdict'), '::before').content")
    assert "Asking the server" in shown
    assert not page.locator("#rewards").is_visible()
    comes(page, lambda: held)
    for route in held:
        route.continue_()
    page.wait_for_selector("body[data-state=live]")
    assert page.locator("#rewards").is_visible()


def test_a_server_that_stops_and_comes_back(visit: Visit) -> None:
    config = settings(None, port=free_port())
    with served.running(config=config) as server:
        page = visit(server.http_url, prepare=with_a_clock, in_own_tab=True, expected=NO_ANSWER)
        assert not page.locator("#notice").is_visible()
        hold_the_clock(page)
    forward(page, 5)
    assert page.locator("body").get_attribute("data-state") == "live", "a moment's silence is not told"
    forward(page, 10)
    page.wait_for_selector("body[data-state=stale]")
    assert re.search(r"No answer for 1\d\ss; trying again", page.locator("#notice").inner_text())
    assert page.locator("#server .pill").inner_text() == "No answer"
    assert "No answer" in page.title()
    forward(page, 20)
    page.wait_for_selector("body[data-state=stopped]")
    assert "has not answered since" in page.locator("#notice").inner_text()
    assert "No answer" in page.title()
    assert page.locator("#server .pill").inner_text() == "No answer"
    page.evaluate("document.getAnimations().forEach((one) => one.finish())")
    style = page.evaluate(
        "(({ opacity, filter }) => [opacity, filter])(getComputedStyle(document.querySelector('#verdict')))"
    )
    assert style == ["1", "grayscale(1)"], "old figures are grey, and can be read"
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    assert page.evaluate("document.querySelector('#notice').getBoundingClientRect().top") >= 0, (
        "seen wherever one reads"
    )
    with served.running(config=config):
        page.click("text=Try again")
        page.wait_for_selector("body[data-state=live]")
        assert not page.locator("#notice").is_visible()
        assert page.locator("#verdict h1").inner_text() == "Ready, and idle"
        leave(page)


@pytest.mark.slow
def test_a_server_that_hangs_is_not_called_ready(idle: str, visit: Visit) -> None:
    held: list[Any] = []
    is_hanging = [True]
    page = visit(idle, prepare=with_a_clock, in_own_tab=True)
    hold_the_clock(page)
    assert page.locator("#server .pill.ok").inner_text() == "Ready"
    page.route("**/dashboard/snapshot*", lambda route: held.append(route) if is_hanging else route.continue_())
    forward(page, 9)  # four intervals
    page.wait_for_selector("body[data-state=stale]")
    assert held, "it was asked"
    assert page.locator("#server .pill").inner_text() == "No answer"
    assert page.locator("#server .pill.ok").count() == 0
    assert re.search(r"The page shows the state of \d\d:\d\d:\d\d", page.locator("#notice").inner_text())
    is_hanging.clear()
    for route in held:
        route.continue_()

    def is_live() -> bool:
        forward(page, 1)  # the last request may have timed out by the held clock, before it was continued
        return bool(page.locator("body").get_attribute("data-state") == "live")

    comes(page, is_live)
    assert page.locator("#server .pill.ok").inner_text() == "Ready"


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_notice_covers_nothing_of_the_bar_and_stays_in_sight(size: tuple[int, int], idle: str, visit: Visit) -> None:
    version = ["1.0"]
    page = visit(
        idle, size=size, prepare=lambda page: alter(page, lambda told: told["server"].update(version=version[0]))
    )
    version[0] = "1.1"
    ask_again(page)
    page.wait_for_selector("#notice:visible")
    place = "document.querySelector('{}').getBoundingClientRect().toJSON()"
    notice = page.evaluate(place.format("#notice"))
    for part in ("#server .pill", ".sections"):
        at = page.evaluate(place.format(part))
        assert at["bottom"] <= notice["top"] or notice["bottom"] <= at["top"], part
    page.evaluate("window.scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
    notice = page.evaluate(place.format("#notice"))
    assert notice["top"] >= 0
    assert notice["bottom"] <= size[1]


def test_the_page_asks_for_a_key_if_the_server_has_keys(tmp_path: Path, visit: Visit) -> None:
    plain = settings(None, port=free_port())
    with served.running(config=plain) as server:
        # A browser asks its user first; this one has been given a key that is none here.
        wrong = {"username": "x", "password": "of another server"}
        page = visit(server.http_url, prepare=with_a_clock, in_own_tab=True, expected=NO_ANSWER, http_credentials=wrong)
    with served.running(config=keyed(tmp_path, port=plain.port, grpc_port=None, models=plain.models)):
        forward(page, 4)
        page.wait_for_selector("body[data-state=refused]")
        assert "asks for a key" in page.locator("#notice").inner_text()
        leave(page)


@pytest.mark.parametrize("role", slow_but(("admin",), ["score", "admin"]))
def test_the_browsers_own_question_for_a_key_opens_the_page(role: str, tmp_path: Path, visit: Visit) -> None:
    config = keyed(tmp_path, grpc_port=None, models=settings(None).models, dashboard_samples=True)
    with served.running(config=config) as server:
        assert httpx.get(server.http_url).status_code == 401
        page = visit(server.http_url, http_credentials={"username": "x", "password": KEYS[role]})
        if role == "admin":
            page.click("text=Show samples of this window")
            page.wait_for_selector("text=None in this window")
        else:
            assert "keys of the role admin" in page.locator("#samples").inner_text()
        leave(page)


def test_a_refusal_says_what_the_server_says(idle: str, visit: Visit) -> None:
    page = visit(f"{idle}/?reference=9-1", "refused", expected=NO_ANSWER)
    assert "The server refuses: the URL has reference=9-1" in page.locator("#notice").inner_text()


@pytest.mark.slow
def test_an_answer_that_cannot_be_shown_is_told_and_the_next_is_asked_for(idle: str, visit: Visit) -> None:
    is_strange = [False]

    def change(told: dict[str, Any]) -> None:
        if is_strange[0]:
            told["models"][0]["outputs"] = None

    page = visit(idle, expected=("Cannot read properties of null",), prepare=lambda page: alter(page, change))
    is_strange[0] = True
    ask_again(page)
    page.wait_for_selector("body[data-state=broken]")
    assert "cannot read the server's answer" in page.locator("#notice").inner_text()
    assert page.title() == "Cannot be shown · guerdon"
    is_strange[0] = False
    ask_again(page)
    page.wait_for_selector("body[data-state=live]")
    assert not page.locator("#notice").is_visible()


@pytest.mark.slow
def test_a_server_of_another_version_has_the_page_loaded_again(idle: str, visit: Visit) -> None:
    version = ["1.0"]
    page = visit(idle, prepare=lambda page: alter(page, lambda told: told["server"].update(version=version[0])))
    assert not page.locator("#notice").is_visible()
    version[0] = "1.1"
    ask_again(page)
    page.wait_for_selector("text=The server is guerdon 1.1 now; this page came with 1.0.")
    page.get_by_role("button", name="Reload").click()
    page.wait_for_selector("body[data-state=live]")
    assert not page.locator("#notice").is_visible()


@pytest.mark.slow
def test_a_verdict_is_said_when_it_changes_and_not_with_each_figure(idle: str, visit: Visit) -> None:
    failing = [0.0]

    def change(told: dict[str, Any]) -> None:
        if failing[0]:
            for lines in told["series"]["models"].values():
                lines["requests_per_s"] = [1.0] * told["series"]["length"]
                lines["errors_per_s"] = [failing[0]] * told["series"]["length"]

    page = visit(idle, prepare=lambda page: alter(page, change))
    page.evaluate(
        """() => {
          window.said = [];
          const node = document.querySelector("#said");
          new MutationObserver(() => window.said.push(node.textContent)).observe(node, { childList: true });
        }"""
    )
    assert page.locator("#said[role=status]").text_content() == "Ready, and idle"
    for percent in (21, 22, 23):
        failing[0] = percent / 100
        ask_again(page)
        page.wait_for_selector(f"#verdict :text('{percent}% of requests fail')")
    said = page.evaluate("window.said")
    assert len(said) == 1
    assert said[0].startswith("Something is wrong. 21% of requests fail")


@pytest.mark.slow
def test_it_works_under_the_prefix_of_a_proxy(idle: str, visit: Visit) -> None:
    with under_a_prefix(idle, "/rewards/one") as url:
        page = visit(url)
        assert page.locator("#verdict h1").inner_text() == "Ready, and idle"
        assert page.evaluate("document.querySelector('.mark img').naturalWidth") > 0
        page.select_option("#try-model", "fair")
        page.locator(".response textarea").first.fill("Is it?")
        page.get_by_role("button", name="Score", exact=True).click()
        page.wait_for_selector(".scored li")
        leave(page)


def test_a_model_that_is_not_served_gives_way_to_one_that_is(idle: str, visit: Visit) -> None:
    page = visit(f"{idle}/?model=nowhere", expected=NO_ANSWER)
    assert page.input_value("#model") == "longwinded"
    until(page, "!document.querySelector('main').hasAttribute('aria-busy')")


@pytest.mark.slow
def test_the_theme_is_the_systems_until_one_is_chosen(idle: str, visit: Visit) -> None:
    page = visit(idle, color_scheme="dark", size=PHONE)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Change to the light theme").click()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    page.wait_for_selector("body[data-state=live]")
    assert page.evaluate(ground) == light, "the choice is kept"


def test_a_server_with_its_page_turned_off_has_none() -> None:
    with served.running(config=settings(None, dashboard=False)) as server:
        assert httpx.get(server.http_url).status_code == 404


def test_the_policy_lets_nothing_foreign_run(idle: str, visit: Visit) -> None:
    page = visit(idle, expected=("Content Security Policy", "violates", "Refused"))
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.wasRun = true";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<p id=styled style='position: fixed'>x</p>");
        }"""
    )
    assert page.evaluate("window.wasRun") is None
    assert page.evaluate("getComputedStyle(document.querySelector('#styled')).position") == "static"
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'held')") == "held"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(idle: str, scheme: str, visit: Visit) -> None:
    on = {
        "ink": ["card", "ground"],
        "soft": ["card", "ground", "grid", "warn-ground", "bad-ground"],
        "good": ["card", "good-ground"],
        "warn": ["card", "warn-ground"],
        "bad": ["card", "bad-ground"],
    }
    page = visit(idle, color_scheme=scheme)
    colours = page.evaluate(
        "names => Object.fromEntries(names.map((name) =>"
        " [name, getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()]))",
        sorted({*on, *(ground for grounds in on.values() for ground in grounds)}),
    )
    for word, grounds in on.items():
        for ground in grounds:
            assert contrast(colours[word], colours[ground]) >= 4.5, (word, ground)


def contrast(one: str, other: str) -> float:
    """Of two colours, `#rrggbb`, as WCAG 2 has it."""
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_placeholders_and_shaded_tokens_stand_out(idle: str, scheme: str, visit: Visit) -> None:
    page = visit(idle, color_scheme=scheme)
    faint = """() => {
      const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const over = (ground, colour) => {
        for (const one of [ground, colour]) {
          paint.fillStyle = one;
          paint.fillRect(0, 0, 1, 1);
        }
        const [red, green, blue] = paint.getImageData(0, 0, 1, 1).data;
        return "#" + [red, green, blue].map((n) => n.toString(16).padStart(2, "0")).join("");
      };
      const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
      const area = getComputedStyle(document.querySelector("#try-prompt"), "::placeholder");
      const found = [[over(card, area.color), over(card, card), Number(area.opacity)]];
      for (const kind of ["high", "low", "prompt high", "prompt low"]) {
        const token = document.createElement("span");
        token.className = `token ${kind}`;
        token.style.setProperty("--depth", `${DEEPEST}%`);
        document.body.append(token);
        const { color, backgroundColor } = getComputedStyle(token);
        found.push([over(card, color), over(card, backgroundColor), 1]);
        token.remove();
      }
      return found;
    }"""
    deepest = page.evaluate("async () => (await import('/dashboard/tokens.js')).DEEPEST")
    found = page.evaluate(faint.replace("DEEPEST", str(deepest)))
    assert len({ground for _, ground, _ in found}) == 5, "shades differ, and the prompt's are paler"
    for colour, ground, opacity in found:
        assert opacity == 1 and contrast(colour, ground) >= 4.5, (colour, ground)


@pytest.mark.slow
def test_no_menu_cuts_a_models_name_on_a_phone(idle: str, visit: Visit) -> None:
    page = visit(idle, size=PHONE)
    for menu, name in (("#model", "longwinded"), ("#other", "no other model")):
        needed = page.evaluate(
            """([menu, name]) => {
              const paint = document.createElement("canvas").getContext("2d");
              paint.font = getComputedStyle(document.querySelector(menu)).font;
              return paint.measureText(name).width;
            }""",
            [menu, name],
        )
        assert page.locator(menu).bounding_box()["width"] > needed + 36, "with the arrow"


def test_everything_that_is_pressed_or_filled_has_a_name(idle: str, visit: Visit) -> None:
    page = visit(idle)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll(
          "button, select, textarea, input, a, svg[role=application]")].filter((node) =>
          !(node.getAttribute("aria-label") || node.textContent.trim() && node.matches("button, a")
            || [...(node.labels ?? [])].some((label) => label.textContent.trim()))).map((node) => node.outerHTML)"""
    )
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert nameless == []
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_the_page_can_be_used_by_the_keyboard_alone(idle: str, visit: Visit) -> None:
    page = visit(idle)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    wanted = {"try-prompt", "Score", "reference", "keep"}
    for _ in range(60):
        page.keyboard.press("Tab")
        wanted.discard(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        if not wanted:
            break
    assert not wanted
