"""Checks that generated pages and pictures are up to date."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from blocks import ROOT

import guerdon
from guerdon.settings.config import (
    ComponentConfig,
    CriticConfig,
    JudgeConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
    TeacherConfig,
)
from processes import environment

RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")


def ran(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


def test_the_page_of_settings_is_not_out_of_date(tmp_path: Path) -> None:
    checked = ran("config_page.py", "--check")
    assert checked.returncode == 0, checked.stderr

    other = tmp_path / "config"
    assert ran("config_page.py", "--out", other).returncode == 0
    text = (other / "server.md").read_text(encoding="utf-8")
    (other / "server.md").write_text(text.replace("`5555`", "`5554`"), encoding="utf-8")
    stale = ran("config_page.py", "--check", "--out", other)
    assert stale.returncode == 1 and "out of date" in stale.stderr and "make pages" in stale.stderr
    assert ran("config_page.py", "--out", other).returncode == 0
    assert ran("config_page.py", "--check", "--out", other).returncode == 0


def test_the_tables_of_tensors_are_not_out_of_date() -> None:
    checked = ran("protocol_tables.py", "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "cls", [ServerConfig, ModelConfig, TeacherConfig, JudgeConfig, CriticConfig, RewardConfig, ComponentConfig]
)
def test_every_setting_has_a_line(cls: type) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/config").glob("*.md"))
    told = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert {field.name for field in dataclasses.fields(cls)} <= {*told}


@pytest.mark.parametrize("name", ["architecture", "result"])
def test_a_picture_is_drawn_and_is_there(name: str, tmp_path: Path) -> None:
    done = ran(f"{name}.py", "--out", tmp_path / "picture.png")
    assert done.returncode == 0, done.stderr
    header = (tmp_path / "picture.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (ROOT / f"docs/images/{name}.png").read_bytes()[:24] == header  # of the same width and height


def test_the_site_and_the_page_have_one_mark() -> None:
    of_the_page = ROOT / "src/guerdon/server/page/static/icon.svg"
    assert (ROOT / "docs/images/mark.svg").read_bytes() == of_the_page.read_bytes()


def test_the_architecture_page_lists_every_room() -> None:
    tree = (ROOT / "docs/house.md").read_text(encoding="utf-8").split("```")[1]
    told = set(re.findall(r"\b([a-z_]+)(?:\.py|/)", tree))
    package = ROOT / "src/guerdon"
    modules = {path.stem for path in package.glob("*.py")} - {"__main__"}
    rooms = {path.parent.name for folder in (package, package / "server") for path in folder.glob("*/__init__.py")}
    assert modules | rooms <= told, (modules | rooms) - told


def test_the_benchmarks_tables_are_those_of_the_results() -> None:
    rows = [
        line for line in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    assert len(rows) > 25
    for row in rows:
        assert row in RESULTS, row


def test_dates_and_commits_on_the_benchmarks_page_stand_in_the_results() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    commits = re.findall(r"^(\d{4}-\d\d-\d\d), (?:commit|on) (\w+)", text, re.MULTILINE)
    assert len(commits) == 6
    for date, commit in commits:
        assert re.search(rf"^{date}, (?:commit|on) {commit}\b", RESULTS, re.MULTILINE), commit


def test_the_readmes_badges_are_true(request: pytest.FixtureRequest) -> None:
    """The number of tests is checked if nearly all files are collected, as by `make test`."""

    def shown(name: str) -> str:
        svg = (ROOT / f"docs/images/badges/{name}.svg").read_text(encoding="utf-8")
        return re.findall(r">([^<]+)</text>", svg)[1]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shown("license") == project["license"]
    assert shown("python") == project["requires-python"].removeprefix(">=") + "+"
    files, known = {item.path for item in request.session.items}, {*(ROOT / "tests").rglob("test_*.py")}
    if len(known & files) > 0.9 * len(known):  # some have slow tests only
        assert len(request.session.items) >= int(shown("tests").removesuffix("+").replace(",", ""))


def test_no_page_is_longer_than_1500_words() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
    generated = [ROOT / "docs/metrics.md", *(ROOT / "docs/config").iterdir()]
    counts = {page.relative_to(ROOT).as_posix(): len(page.read_text(encoding="utf-8").split()) for page in pages}
    written = {name: count for name, count in counts.items() if ROOT / name not in generated}
    assert len(written) > 60
    assert {name: count for name, count in written.items() if count > 1_500} == {}


ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
"""The site's pages outside docs/."""


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=env, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    made = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert path.replace("README.html", "index.html") in made, path
    assert {"index.html", "repository/benchmarks/RESULTS.html", "repository/CONTRIBUTING.html"} <= made
    assert "The model server for RL post-training" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_reference_has_every_public_name_once(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    anchors = Counter(re.findall(r'<h\d id="(guerdon\.[\w.]+)"', text))
    assert {f"guerdon.{name}" for name in guerdon.__all__} <= {*anchors}
    assert not [name for name, count in anchors.items() if count > 1]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"guerdon\.adapters\.[a-z_]+", page.read_text())}
    assert named and named <= {*anchors}


@pytest.mark.slow
def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.relative_to(site)} leads to {target}"


@pytest.mark.slow
def test_nothing_is_asked_of_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        asked = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href|srcset)=\"?(?:https?:)?//[^\s\">]*", text
        )
        assert not asked, asked
    for path in site.rglob("*.css"):
        asked = re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//[^\s\"')]*", path.read_text(encoding="utf-8"))
        assert not asked, asked


@pytest.mark.slow
def test_each_broken_link_fails(tmp_path: Path) -> None:
    links = ["no_page.md", "page.md#no-heading", "../benchmarks/NOTHING.md"]
    for path in ("docs/page.md", *ALWAYS):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(
            "# A page\n\nSee [that page](LINK).\n".replace("LINK", "../" * path.count("/") + "docs/page.md")
        )
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "docs/images", tmp_path / "docs/images")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0])
    sound = build(tmp_path, tmp_path / "sound")
    assert sound.returncode == 0, sound.stdout + sound.stderr

    with (tmp_path / "docs/page.md").open("a") as page:
        page.writelines(f"\nSee [this]({link}).\n" for link in links)
    broken = build(tmp_path, tmp_path / "broken")
    told = broken.stdout + broken.stderr
    assert broken.returncode != 0 and "Aborted with 3 warnings in strict mode" in told, told
    for link in links:
        assert link.rpartition("/")[2] in told, told
