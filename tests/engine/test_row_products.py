"""Products and activations inside `RowProducts` are PyTorch's, and each row's have the same bits among any others."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.engine.native.library import find
from guerdon.engine.row_products import RowProducts


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
