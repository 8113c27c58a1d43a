"""OpenMP's threads: the main thread's end once the models are loaded, and all of them spin only briefly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import zoo
from processes import environment

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")

POOL = """
import os, threading, torch
from guerdon.engine.host_threads import end_pool
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
from guerdon.assembly import build_service
from guerdon.settings.config import ModelConfig, ServerConfig
import torch
torch.set_num_threads(3)
torch.sin(torch.ones(600, 600))
with_pool = len(os.listdir("/proc/self/task"))
service = build_service(ServerConfig(models=[ModelConfig(model=sys.argv[1])]))
print(with_pool, len(os.listdir("/proc/self/task")) - (threading.active_count() - 1))
"""


COMMAND = "from guerdon.cli import main; main(['completion', 'bash']); import torch"
SERVER = "import guerdon; guerdon.RewardModelServer; import torch"
TOO_LATE = (
    "import torch; import guerdon; guerdon.RewardModelServer; import os; assert 'GOMP_SPINCOUNT' not in os.environ"
)


def run(code: str, *arguments: str, **variables: str) -> str:
    inherited = {k: v for k, v in environment().items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=inherited | {"OMP_NUM_THREADS": "3"} | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + (done.stderr if "OMP_DISPLAY_ENV" in variables else "")


def test_a_pool_ends_and_comes_back() -> None:
    run(POOL)


def test_a_server_waits_with_no_threads_but_its_own(tmp_path: Path) -> None:
    with_pool, native = map(int, run(SERVICE, str(zoo.checkpoint("llama", tmp_path))).split())
    assert native <= with_pool - 2


@pytest.mark.parametrize(
    ("code", "variables", "want"),
    [
        (COMMAND, {}, 1000),
        (COMMAND, {"GOMP_SPINCOUNT": "77"}, 77),
        (COMMAND, {"OMP_WAIT_POLICY": "PASSIVE"}, 0),
        (SERVER, {}, 1000),
    ],
)
def test_threads_spin_briefly_unless_the_environment_says_otherwise(
    code: str, variables: dict[str, str], want: int
) -> None:
    shown = run(code, OMP_DISPLAY_ENV="VERBOSE", **variables)
    assert f"GOMP_SPINCOUNT = '{want}'" in shown


def test_a_torch_that_is_loaded_is_left_alone() -> None:
    run(TOO_LATE)
