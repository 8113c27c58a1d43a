"""The kernels for CPUs, built with AddressSanitizer and UndefinedBehaviorSanitizer, and called with random inputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guerdon.engine.native.library import find

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or ""
SANITIZE = "-fsanitize=address,undefined"
FLAGS = f"{SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -fno-wrapv"
"""Python's own flags may have -fwrapv, with which no signed overflow would be found."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "1",
}
"""Python leaks on purpose; an allocation beyond the limit fails as if the machine's memory were at its end."""
LEVELS = ["avx512_bf16", "avx512", "avx2", "baseline"]
OWN = LEVELS.index(find()[1]) if find()[0] else 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find()[0] is None or not COMPILER, reason=f"no kernels or no g++: {find()[1]}"),
]


def runtimes() -> str:
    """Returns what must be in the process first: AddressSanitizer, and C++'s library, whose exceptions it looks up."""
    names = ("libasan.so", "libstdc++.so")
    paths = [
        subprocess.run(
            [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    return " ".join(paths) if all(Path(path).is_file() for path in paths) else pytest.skip("no AddressSanitizer")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, whose kernels setup.py has built with the sanitizers."""
    runtimes()
    source, objects = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("objects")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--parallel", "2", "--build-lib", "src"]
    environ = os.environ | {"CC": "gcc", "CXX": "g++", "CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "LDFLAGS": SANITIZE}
    done = subprocess.run(
        [*build, "--build-temp", str(objects)], cwd=source, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and [*source.rglob("kernels_*.so")], done.stdout + done.stderr
    return source / "src"


def run(package: Path, level: str, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | OPTIONS | {"LD_PRELOAD": runtimes()}
    if level != "avx512_bf16":
        environ["ATEN_CPU_CAPABILITY"] = "default" if level == "baseline" else level
    environ["PYTHONPATH"] = f"{package}{os.pathsep}{ROOT / 'tests'}"
    return subprocess.run(
        [sys.executable, "-m", "fuzz.kernels", *argv], env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("level", LEVELS[OWN:])
def test_random_inputs_stay_in_their_buffers_and_fit_the_formulas(level: str, package: Path) -> None:
    done = run(package, level, "--inputs", "150")
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-6000:]
    assert done.stdout.endswith(f"600 inputs with {level}\n")


@pytest.mark.parametrize("level", LEVELS[OWN:])
def test_an_output_that_is_one_number_too_short_is_found(level: str, package: Path) -> None:
    done = run(package, level, "--only", "overrun")
    assert done.returncode and "heap-buffer-overflow" in done.stderr and "norm_row" in done.stderr


def test_scratch_that_does_not_fit_is_out_of_memory(package: Path) -> None:
    done = run(package, LEVELS[OWN], "--only", "too_large")
    assert (done.returncode, done.stdout) == (0, "out of memory\n"), done.stderr[-6000:]
