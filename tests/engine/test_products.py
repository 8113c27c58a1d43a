"""Half precision on processors without units for it: oneDNN is told to do without them, in processes of its own."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo
from guerdon.engine.products import flops_per_second

LOADS = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.settings.config import ModelConfig
for dtype in ("auto", "bfloat16"):
    load_reward_model(ModelConfig(model=sys.argv[1], dtype=dtype))
    print(f"that was {dtype}", file=sys.stderr)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limits are those of x86-64")
@pytest.mark.slow
def test_slow_half_precision_is_warned_of_with_its_factor(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "model")
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
    log = subprocess.run(
        [sys.executable, "-c", LOADS, folder], env=environment, capture_output=True, text=True, check=True
    ).stderr
    of_auto, of_bfloat16 = log.split("that was auto")
    assert "bfloat16 takes" in of_bfloat16 and "times as long as float32" in of_bfloat16
    assert "times as long" not in of_auto


def test_the_rate_is_that_of_real_products() -> None:
    # More than an abacus, less than any processor of the next decade has.
    assert all(1e7 < rate < 1e15 for rate in flops_per_second(torch.float32, torch.bfloat16))
