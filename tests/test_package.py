"""The distributions: the source's has what its tests read, the wheel has the kernels, and no link leads nowhere."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "scripts", "deploy", ".ci", ".github")
FILES = (
    "CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile",
    "README.md", "SECURITY.md", "constraints.txt", "mkdocs.yml", "pyproject.toml", "setup.py", ".dockerignore",
)  # fmt: skip
MADE = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.egg-info")
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
page, urls = SETUP["page"], SETUP["urls"]
contents = runpy.run_path(str(ROOT / "scripts/try_wheel.py"), run_name="try_wheel")["contents"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked distribution."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=MADE)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(made, filter="data")
    return made / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
def test_the_distribution_has_what_its_tests_read(unpacked: Path) -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT)
            if path.is_file() and not re.search(r"__pycache__|\.py[cod]$|\.egg-info|/kernels_\w+\.so$", str(inside)):
                assert (unpacked / inside).is_file(), inside
    assert all((unpacked / name).is_file() for name in FILES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tests_of_pages_and_files_pass_in_the_distribution(unpacked: Path) -> None:
    tests = ["tests/test_docs.py", "tests/test_layout.py", "tests/test_examples.py", "tests/wire/test_score_tensors.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_every_test_of_the_distribution_is_found(unpacked: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_wheel_of_the_distribution_has_the_kernels(unpacked: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=unpacked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("guerdon-*-py3-none-linux_*.whl")
    assert contents(wheel)


@pytest.mark.parametrize(
    "files",
    [["kernels_avx2.so"], [f"kernels_{level}.so" for level in ("avx2", "avx512", "avx512_bf16", "baseline")]],
)
def test_a_wheel_without_a_kernel_or_with_a_runtime_of_openmp_is_refused(files: list[str], tmp_path: Path) -> None:
    wheel = tmp_path / "guerdon-0-py3-none-linux_x86_64.whl"
    names = [f"guerdon/engine/native/{name}" for name in files]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in names:
            file.writestr(name, "")
    if len(files) == 4:
        assert contents(wheel) == {*names}
        with zipfile.ZipFile(wheel, "a") as file:
            file.writestr("guerdon.libs/libgomp-1234.so.1.0.0", "")
    with pytest.raises(SystemExit, match="instead of"):
        contents(wheel)


@pytest.mark.slow
def test_the_packages_page_has_no_link_into_the_repository(unpacked: Path) -> None:
    text = (unpacked / "PKG-INFO").read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in text and "# guerdon" in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for made, targets in ((text, r"https?:"), (page(readme, "https://example.org/guerdon"), r"https?:")):
        for target in re.findall(r'\]\(([^)]+)\)|src="([^"]+)"', made):
            assert re.match(targets, "".join(target)), target
    assert "](http://127.0.0.1:5555)" in text and "a first run (`docs/guides/first_run.md`)" in text


@pytest.mark.slow
def test_the_package_has_links_only_to_a_public_repository(unpacked: Path) -> None:
    text = (unpacked / "PKG-INFO").read_text(encoding="utf-8")
    assert ("Project-URL:" in text) == bool(SETUP["REPOSITORY"])
    assert urls("") == {} and urls("https://x/g")["Issues"] == "https://x/g/issues"


@pytest.mark.parametrize(
    ("text", "plain", "public"),
    [
        ("[a](docs/a.md#b)", "a (`docs/a.md`)", "[a](https://x/g/blob/HEAD/docs/a.md#b)"),
        ("[LICENSE](LICENSE)", "LICENSE", "[LICENSE](https://x/g/blob/HEAD/LICENSE)"),
        ("[a](http://a)", "[a](http://a)", "[a](http://a)"),
        ("[a](#b)", "a", "[a](https://x/g#b)"),
        ("![a](docs/a.png)", "*a*", "![a](https://x/g/raw/HEAD/docs/a.png)"),
        ('<img src="docs/a.png" width="5" alt="a">', "*a*", "![a](https://x/g/raw/HEAD/docs/a.png)"),
    ],
)
def test_links_and_pictures_of_the_page(text: str, plain: str, public: str) -> None:
    assert (page(text, ""), page(text, "https://x/g")) == (plain, public)
