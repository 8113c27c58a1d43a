"""The documentation's site builds without warnings, needs no other host, and fails on broken links."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from blocks import ROOT

import guerdon

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


def test_every_page_is_there(site: Path) -> None:
    made = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert path.replace("README.html", "index.html") in made, path
    assert {"index.html", "repository/benchmarks/RESULTS.html", "repository/CONTRIBUTING.html"} <= made
    assert "The model server for RL post-training" in (site / "index.html").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name_once(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    anchors = Counter(re.findall(r'<h\d id="(guerdon\.[\w.]+)"', text))
    assert {f"guerdon.{name}" for name in guerdon.__all__} <= {*anchors}
    assert not [name for name, count in anchors.items() if count > 1]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"guerdon\.adapters\.[a-z_]+", page.read_text())}
    assert named and named <= {*anchors}


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.relative_to(site)} leads to {target}"


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
