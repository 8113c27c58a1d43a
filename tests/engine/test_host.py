"""Memory that malloc keeps for models on a CPU; OpenMP's pools end once models are loaded, and threads spin briefly."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import zoo
from processes import environment

TESTS = Path(__file__).parents[1]
needs_linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc decides for itself")

POOL = """
import os, threading, torch, guerdon
guerdon.RewardModelServer
assert "GOMP_SPINCOUNT" not in os.environ  # torch is loaded, and has read it
from guerdon.engine.host import end_pool
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
alone = count()
many = torch.ones(600, 600)
torch.sin(many)
assert count() >= alone + 2, (alone, count())
end_pool()
assert count() == alone, (alone, count())
assert torch.equal(torch.sin(many), torch.sin(many[:1].expand(600, 600)))
assert count() >= alone + 2  # it is there again where it is needed
"""

SERVICE = """
import os, sys, threading
import guerdon
guerdon.RewardModelServer
import torch
from guerdon.assembly import build_service
from guerdon.settings.config import ModelConfig, ServerConfig
torch.set_num_threads(3)
torch.sin(torch.ones(600, 600))
with_pool = len(os.listdir("/proc/self/task"))
service = build_service(ServerConfig(models=[ModelConfig(model=sys.argv[1])]))
print(with_pool, len(os.listdir("/proc/self/task")) - (threading.active_count() - 1))
"""


GAPS = """
import ctypes, sys
from guerdon.assembly import build_service
from guerdon.settings.config import ModelConfig, ServerConfig

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free f".split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Heap
service = build_service(ServerConfig(models=[ModelConfig(model=sys.argv[1])]))
heap = mallinfo2()
print(heap.mapped, heap.free)
"""

COMMAND = "from guerdon.cli import main; main(['completion', 'bash'])"
LIBGOMP = """
import ctypes, importlib.util, pathlib
paths = [*pathlib.Path(importlib.util.find_spec("torch").origin).parent.glob("lib/libgomp*")]
if paths:  # the one that torch brings, without all the rest
    ctypes.CDLL(str(paths[0]))
else:
    import torch
"""


def run(code: str, *arguments: str, **variables: str) -> str:
    inherited = {k: v for k, v in environment().items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=inherited | {"OMP_NUM_THREADS": "3"} | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + (done.stderr if "OMP_DISPLAY_ENV" in variables else "")


@pytest.mark.slow
@needs_linux
def test_a_pool_ends_and_comes_back_and_a_loaded_torch_is_left_alone() -> None:
    run(POOL)


@needs_linux
@pytest.mark.slow
def test_a_server_waits_with_no_threads_but_its_own_and_they_spin_briefly(tmp_path: Path) -> None:
    output = run(SERVICE, str(zoo.checkpoint("llama", tmp_path)), OMP_DISPLAY_ENV="VERBOSE")
    with_pool, native = map(int, output.splitlines()[0].split())
    assert native <= with_pool - 2
    assert "GOMP_SPINCOUNT = '1000'" in output


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize(
    ("code", "variables", "want"),
    [
        (COMMAND + LIBGOMP, {}, 1000),
        pytest.param(COMMAND + LIBGOMP, {"GOMP_SPINCOUNT": "77"}, 77, marks=pytest.mark.slow),
        pytest.param(COMMAND + LIBGOMP, {"OMP_WAIT_POLICY": "PASSIVE"}, 0, marks=pytest.mark.slow),
    ],
)
def test_threads_spin_briefly_unless_the_environment_overrides_it(
    code: str, variables: dict[str, str], want: int
) -> None:
    assert f"GOMP_SPINCOUNT = '{want}'" in run(code, OMP_DISPLAY_ENV="VERBOSE", **variables)


# ------------------------------------------------------------------------------------------------- memory


def kept(*arguments: str, **variables: str) -> list[dict[str, float]]:
    """What tests/kept_memory.py measures, with these variables in its environment."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, TESTS / "kept_memory.py", *arguments],
        env=plain | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_glibc
@pytest.mark.slow
def test_weights_in_onednns_order_leave_no_gaps_in_the_heap(tmp_path: Path) -> None:
    """A batch cannot use gaps of the size of a weight, so the heap would grow by as much again."""
    num_layers, hidden, inner = 8, 256, 1024
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 4,
    }
    folder = zoo.checkpoint("llama", tmp_path, **sizes, num_key_value_heads=4, head_dim=64)
    num_bytes = 4 * num_layers * (4 * hidden**2 + 3 * hidden * inner)
    mapped, free = map(int, run(GAPS, str(folder)).split()[:2])
    assert mapped > 0.9 * num_bytes and free < num_bytes / 4  # some find room in the heap


@needs_glibc
@pytest.mark.slow
def test_memory_that_a_model_frees_is_kept_for_the_next_batch(tmp_path: Path) -> None:
    folders = zoo.checkpoint("llama", tmp_path / "a"), zoo.language_model("llama", tmp_path / "b")
    both = kept(f"reward_model={folders[0]}", f"policy={folders[1]}")
    assert len(both) == 2
    for measured in both:
        assert measured["faults"] < 1000
        # It is returned if memory seems short, and when a model is unloaded.
        assert measured["looked_mib"] < measured["held_mib"] - 100
        assert measured["released_mib"] < measured["held_again_mib"] - 100


@needs_glibc
@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, marks=pytest.mark.slow),
        pytest.param({"MALLOC_ARENA_MAX": "8"}, marks=pytest.mark.slow),
    ],
    ids=["variable", "tunable", "arenas"],
)
def test_the_environment_overrides_what_malloc_keeps(variables: dict[str, str]) -> None:
    (measured,) = kept("nothing", **variables)
    assert measured["faults"] > 15_000
