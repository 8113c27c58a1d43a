"""The native passes against transformers in any dtype, width and stride, and each row's bits alone and among others."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama import modeling_llama as llama

from guerdon.engine.native import passes
from guerdon.engine.native.library import find

pytestmark = pytest.mark.skipif(find()[0] is None, reason=f"no kernels: {find()[1]}")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [2, 14, 64, 78, 576]
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def found(result: Tensor | None) -> Tensor:
    assert result is not None
    return result


def norm(x: Tensor, width: int) -> Tensor:
    return found(passes.norm(x, torch.linspace(-1, 2, width).to(x.dtype), 0.1))


def transformers_norm(x: Tensor, width: int) -> Tensor:
    module = llama.LlamaRMSNorm(width, eps=0.1).to(x.dtype)
    module.weight.data = torch.linspace(-1, 2, width).to(x.dtype)
    return module(x)


def silu(x: Tensor, width: int) -> Tensor:
    return found(passes.gated(x * 4, x.flip(-1), passes.SILU))


def gelu(x: Tensor, width: int) -> Tensor:
    return found(passes.gated(x * 4, x.flip(-1), passes.GELU_BY_TANH))


def rotated(x: Tensor, width: int) -> Tensor:
    return found(passes.rotated(x[None, None], x.cos()[None], x.sin()[None]))[0, 0]


CASES: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "norm": (norm, transformers_norm),
    "silu": (silu, lambda x, width: F.silu(x * 4) * x.flip(-1)),
    "gelu": (gelu, lambda x, width: F.gelu(x * 4, approximate="tanh") * x.flip(-1)),
    "gelu by erf": (lambda x, width: found(passes.activated(x * 4, passes.GELU)), lambda x, width: F.gelu(x * 4)),
    "sigmoid": (lambda x, width: found(passes.activated(x * 4, passes.SIGMOID)), lambda x, width: torch.sigmoid(x * 4)),
    "rotated": (
        rotated,
        lambda x, width: llama.apply_rotary_pos_emb(x[None, None], x[None, None], x.cos()[None], x.sin()[None])[0][
            0, 0
        ],
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_each_gives_what_transformers_gives(name: str, width: int, dtype: torch.dtype) -> None:
    own, theirs = CASES[name]
    x = numbers(37, width, dtype=dtype)
    got, want = own(x, width).double(), theirs(x, width).double()
    assert (got - want).norm() <= ROUNDED[dtype] * want.norm()
    # And rounds where it does, but for GELU: PyTorch's loses digits below -3.
    assert dtype == torch.float32 or "gelu" in name or (got == want).double().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_alone_and_with_any_threads(name: str, dtype: torch.dtype) -> None:
    own = CASES[name][0]
    x = numbers(999, 78, dtype=dtype)
    want = own(x, 78)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(own(x, 78), want)
    finally:
        torch.set_num_threads(before)
    for i in (0, 1, 500, 998):
        assert torch.equal(own(x[i : i + 1], 78)[0], want[i])


@pytest.mark.parametrize("name", CASES)
def test_rows_apart_in_memory(name: str) -> None:
    own = CASES[name][0]
    wide = numbers(20, 100)
    assert torch.equal(own(wide[:, 11:89], 78), own(wide[:, 11:89].clone(), 78))
    columns = numbers(78, 20).t()
    assert name == "rotated" or torch.equal(own(columns, 78), own(columns.clone(), 78))


@pytest.mark.parametrize("name", CASES)
def test_a_broken_row_breaks_no_other(name: str) -> None:
    own = CASES[name][0]
    x = numbers(5, 78)
    want = own(x, 78)
    x[2] = float("nan")
    got = own(x, 78)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@pytest.mark.parametrize("value", [-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30])
def test_large_numbers_neither_overflow_nor_become_nan(value: float) -> None:
    gate, up = torch.full((1, 40), value), torch.ones(1, 40)
    torch.testing.assert_close(passes.gated(gate.clone(), up, passes.SILU), F.silu(gate))
    torch.testing.assert_close(passes.gated(gate.clone(), up, passes.GELU_BY_TANH), F.gelu(gate, approximate="tanh"))
    torch.testing.assert_close(passes.activated(gate, passes.GELU), F.gelu(gate))
    torch.testing.assert_close(passes.activated(gate, passes.SIGMOID), torch.sigmoid(gate))


def test_gelu_keeps_its_digits_in_the_tail() -> None:
    x = torch.linspace(-9, 9, 2001)
    want = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    assert ((found(passes.activated(x[None], passes.GELU))[0] - want).abs() <= 2e-5 * want.abs()).all()


def test_what_the_kernels_do_not_take_is_left_to_the_caller() -> None:
    x, weight = numbers(3, 16), numbers(16)
    assert passes.norm(x.double(), weight.double(), 0.1) is None
    assert passes.norm(x, weight.bfloat16(), 0.1) is None
    assert passes.norm(x, numbers(32), 0.1) is None and passes.norm(x, numbers(32)[::2], 0.1) is None
    assert passes.gated(x, x[:1], passes.SILU) is None
    assert passes.rotated(numbers(1, 2, 3, 16), numbers(1, 3, 8), numbers(1, 3, 8)) is None
    assert passes.rotated(numbers(2, 2, 3, 16), numbers(1, 3, 16), numbers(1, 3, 16)) is None
    assert passes.rotated(numbers(1, 2, 3, 15), numbers(1, 3, 15), numbers(1, 3, 15)) is None
    assert passes.norm(x[:0], weight, 0.1) is not None


@pytest.mark.parametrize("name", CASES)
def test_with_gradients_the_result_is_no_view_that_fsdp_would_warn_of(name: str) -> None:
    own, theirs = CASES[name]
    x = numbers(4, 78).requires_grad_()
    made = passes.computed(lambda x: own(x, 78).detach(), lambda x: theirs(x, 78), x)
    assert made.requires_grad and made._base is None
    assert torch.autograd.grad(made.sum(), x)[0].isfinite().all()
