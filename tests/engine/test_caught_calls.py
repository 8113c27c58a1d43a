"""Products and activations inside `RowProducts` are PyTorch's, and each row's have the same bits among any others."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from guerdon.engine.caught_calls import RowProducts
from guerdon.engine.native.library import find
from guerdon.engine.product_speed import flops_per_second, say_if_other_is_faster


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


W, B, MATRICES = numbers(40, 24), numbers(40), numbers(3, 24, 40)
ENDS = torch.tensor([1, 1, 5], dtype=torch.int32)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W, B),
    "linear, named": lambda x: F.linear(x, W, bias=B),
    "matmul": lambda x: x @ W.t(),
    "torch.matmul": lambda x: torch.matmul(x, W.t()),
    "mm": lambda x: x.mm(W.t()),
    "addmm": lambda x: torch.addmm(B, x, W.t()),
    "bmm": lambda x: torch.bmm(x.expand(3, -1, -1), MATRICES)[1],
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "sigmoid": lambda x: x.sigmoid() + torch.sigmoid(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_is_pytorchs_with_its_gradient(name: str) -> None:
    call, found = CALLS[name], []
    for inside in (False, True):
        x = numbers(9, 24).requires_grad_()
        if inside:
            with RowProducts():
                out = call(x)
        else:
            out = call(x)
        out.square().sum().backward()
        found.append((out, x.grad))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(find()[0] is None, reason="activations are the kernels'")
@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_same_bits_among_any_others(name: str) -> None:
    x, call = numbers(77, 24), CALLS[name]
    with RowProducts():
        want = call(x)
        for count in (1, 2, 3, 5, 76):
            assert torch.equal(call(x[-count:]), want[-count:])


def test_experts_without_rows_and_rows_without_experts() -> None:
    if not hasattr(F, "grouped_mm"):
        pytest.skip("an older PyTorch")
    x = numbers(6, 24)
    with RowProducts():
        got = F.grouped_mm(x, MATRICES, offs=ENDS)
    want = [x[:1] @ MATRICES[0], x[1:5] @ MATRICES[2], torch.zeros(1, 40)]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=1e-5)


def test_what_is_no_product_of_rows_stays_pytorchs() -> None:
    vector, table = numbers(24), numbers(24, 24)
    with RowProducts():
        assert torch.equal(table @ vector, table.mv(vector))
        out = torch.empty(24, 24)
        assert torch.matmul(table, table, out=out) is out
        assert F.silu(table.clone(), inplace=True).shape == table.shape


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


def test_float32_names_bfloat16_where_it_multiplies_faster(caplog: pytest.LogCaptureFixture) -> None:
    base, half = flops_per_second(torch.float32, torch.bfloat16)
    say_if_other_is_faster.cache_clear()  # a model of another test may have said it
    with caplog.at_level("INFO"):
        for _ in range(2):
            say_if_other_is_faster(torch.float32, torch.device("cpu"))
    expected = f"--dtype bfloat16 would multiply {half / base:.1f} times as fast" if half / base >= 1.3 else ""
    assert expected in caplog.text and len(caplog.records) == bool(expected)
