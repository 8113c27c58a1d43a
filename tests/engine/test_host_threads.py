"""A server's main thread loads its models and then leaves computing to another: its OpenMP threads are gone by then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zoo

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
from guerdon.config import ModelConfig, ServerConfig
import torch
torch.set_num_threads(3)
torch.sin(torch.ones(600, 600))
with_pool = len(os.listdir("/proc/self/task"))
service = build_service(ServerConfig(models=[ModelConfig(model=sys.argv[1])]))
print(with_pool, len(os.listdir("/proc/self/task")) - (threading.active_count() - 1))
"""


def run(code: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pool_ends_and_comes_back() -> None:
    run(POOL)


def test_a_server_waits_with_no_threads_but_its_own(tmp_path: Path) -> None:
    with_pool, native = map(int, run(SERVICE, str(zoo.checkpoint("llama", tmp_path))).split())
    assert native <= with_pool - 2
