"""The installation commands in messages work, and only one function writes them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from guerdon.errors import install_command
from processes import environment

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_advised_command_installs(tmp_path: Path) -> None:
    pip, install, what = shlex.split(install_command("server").removesuffix(" in a clone of guerdon"))
    assert (pip, install) == ("pip", "install")
    shutil.copytree(ROOT / "src/guerdon", tmp_path / "src/guerdon")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(  # without its dependencies, which would be downloaded
        [sys.executable, "-m", "pip", "install", what, "--dry-run", "--no-deps", "--no-index", "--no-build-isolation"],
        cwd=tmp_path, env=environment() | {"PYTHONPATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "guerdon" in done.stdout and "does not provide the extra" not in done.stderr


def test_only_one_function_says_how_to_install() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in [*(ROOT / "src").rglob("*.py"), *pages]:
        has_advice = re.search(r"pip install (--upgrade )?'?guerdon\b", path.read_text())
        assert path.name == "errors.py" or not has_advice, path
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert path.name == "errors.py" or not re.search(r"pip install '?\.", text), path
        for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", text):
            assert extra in EXTRAS, f"{path}: {extra}"
