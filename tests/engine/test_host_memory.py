from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import zoo

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc decides for itself")


def kept(kind: str, folder: Path, **variables: str) -> dict[str, float]:
    """What tests/kept_memory.py says in a process of its own, with these variables in its environment."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, TESTS / "kept_memory.py", kind, folder],
        env=plain | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, float] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("kind", ["reward_model", "policy"])
def test_what_a_models_process_frees_is_there_for_the_next_batch(kind: str, tmp_path: Path) -> None:
    make = zoo.checkpoint if kind == "reward_model" else zoo.language_model
    told = kept(kind, make("llama", tmp_path / "model"))
    assert told["faults"] < 1000
    # Where memory seems short, and where a model is given up, it goes back.
    assert told["looked_mib"] < told["held_mib"] - 100
    assert told["released_mib"] < told["held_again_mib"] - 100


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
        {"MALLOC_ARENA_MAX": "8"},
    ],
    ids=["variable", "tunable", "arenas"],
)
def test_whoever_has_settled_it_in_the_environment_is_left_alone(tmp_path: Path, variables: dict[str, str]) -> None:
    assert kept("reward_model", zoo.checkpoint("llama", tmp_path / "model"), **variables)["faults"] > 15_000
