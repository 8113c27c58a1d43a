"""Log-probs and entropies in parts, and their gradients, against autograd over whole tables in float64."""

import pytest
import torch
from torch import Tensor

from guerdon.engine import logprobs as module
from guerdon.engine.logprobs import token_logprobs

N, V = 23, 40


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with one that stands out and one that is impossible, targets, and what each result counts in a loss."""
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(N, V, generator=random)
    logits[3, 5], logits[4, 7] = 60.0, -60.0
    targets = torch.randint(0, V, (N,), generator=random)
    return logits.to(dtype), targets, torch.randn(N, generator=random), torch.randn(N, generator=random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1, 5 * V, 1000 * V])
def test_they_and_their_gradients_are_those_of_whole_tables(
    size: int, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.CACHED, "cpu", size)
    logits, targets, counts, entropy_counts = tables(dtype)
    exact = logits.double().requires_grad_()
    table = torch.log_softmax(exact / temperature, -1)
    wanted = table[torch.arange(N), targets], -(table.exp() * table).sum(-1)
    for with_entropies in (False, True):
        own = logits.clone().requires_grad_()
        logprobs, entropies = token_logprobs(own, targets, temperature, with_entropies=with_entropies)
        assert logprobs.dtype == torch.float32 and (entropies is not None) == with_entropies
        loss, want = (logprobs * counts).sum(), (wanted[0] * counts).sum()
        torch.testing.assert_close(logprobs.double(), wanted[0], rtol=1e-5, atol=1e-5)
        if entropies is not None:
            torch.testing.assert_close(entropies.double(), wanted[1], rtol=1e-5, atol=1e-5)
            loss, want = loss + (entropies * entropy_counts).sum(), want + (wanted[1] * entropy_counts).sum()
        (slope,) = torch.autograd.grad(want, exact, retain_graph=True)
        loss.backward()
        assert own.grad is not None and own.grad.dtype == dtype
        near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(own.grad.double(), slope, **near)


def test_entropies_that_nothing_is_made_of_change_no_gradient() -> None:
    logits, targets, counts, _ = tables(torch.float32)
    slopes = []
    for with_entropies in (False, True):
        own = logits.clone().requires_grad_()
        logprobs, _ = token_logprobs(own, targets, with_entropies=with_entropies)
        slopes += torch.autograd.grad((logprobs * counts).sum(), own)
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-7)


def test_a_target_that_is_masked_out_spoils_no_other() -> None:
    """Its own log-prob is -inf, and the gradient of it what `log_softmax` gives."""
    logits, targets, _, _ = tables(torch.float32)
    logits[2, targets[2]] = -torch.inf
    own, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, _ = token_logprobs(own, targets)
    assert logprobs[2] == -torch.inf and logprobs.isfinite().sum() == N - 1
    logprobs.backward(torch.ones(N))
    torch.log_softmax(other, -1)[torch.arange(N), targets].backward(torch.ones(N))
    torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("size", [1, 1000 * V])
def test_a_masked_vocabulary_counts_as_if_it_were_not_there(
    size: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.CACHED, "cpu", size)
    logits, _, counts, entropy_counts = tables(torch.float32)
    is_there = torch.arange(V) % 3 > 0
    logits[:, ~is_there] = -torch.inf
    chosen = torch.arange(N) % int(is_there.sum())
    targets = is_there.nonzero()[chosen, 0]
    exact = logits[:, is_there].double().requires_grad_()
    table = torch.log_softmax(exact / temperature, -1)
    wanted = table[torch.arange(N), chosen], -(table.exp() * table).sum(-1)
    ((wanted[0] * counts).sum() + (wanted[1] * entropy_counts).sum()).backward()

    own = logits.clone().requires_grad_()
    logprobs, entropies = token_logprobs(own, targets, temperature, with_entropies=True)
    assert entropies is not None
    ((logprobs * counts).sum() + (entropies * entropy_counts).sum()).backward()
    torch.testing.assert_close(logprobs.double(), wanted[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropies.double(), wanted[1], rtol=1e-5, atol=1e-4)
    assert own.grad is not None and exact.grad is not None
    torch.testing.assert_close(own.grad[:, is_there].double(), exact.grad, rtol=1e-3, atol=1e-3)
    assert not own.grad[:, ~is_there].any()
