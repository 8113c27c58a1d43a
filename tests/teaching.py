"""What transformers makes of the questions that a teacher is asked, one sequence at a time."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from guerdon.core import Sequence
from guerdon.teacher_core import LogprobQuery, TokenLogprobs


@torch.no_grad()
def plain(folder: Path, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """The logits `[T,V]` of each sequence by itself, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0] for row in rows]


def check(answer: TokenLogprobs, logits: torch.Tensor, s: Sequence) -> None:
    """Asserts that all that was asked for equals what the plain logits give."""
    query = s.ask or LogprobQuery()
    first = query.first(s.prompt_length)
    table = torch.log_softmax(logits / query.temperature, -1).numpy()
    asked, targets = table[first - 1 : -1], s.tokens[first:]
    near = {"rtol": 1e-6, "atol": 1e-5}  # an unlikely token's log-prob is large, and float32 has seven digits
    if query.with_logprobs:
        actual = asked[np.arange(len(targets)), targets]
        np.testing.assert_allclose(answer.logprobs, actual, **near)
    if query.with_ranks:
        assert answer.ranks is not None
        near_ties = np.abs(asked - asked[np.arange(len(targets)), targets, None]) < 1e-5
        at_least = (asked >= asked[np.arange(len(targets)), targets, None]).sum(1)
        assert (np.abs(answer.ranks - at_least) < near_ties.sum(1)).all()
    if query.with_entropy:
        np.testing.assert_allclose(answer.entropy, -(np.exp(asked) * asked).sum(1), **near)
    if query.top_k:
        assert answer.top_ids is not None and answer.top_ids.shape == (len(targets), query.top_k)
        np.testing.assert_allclose(answer.top_logprobs, np.take_along_axis(asked, answer.top_ids, 1), **near)
        # The same ids; two that are apart by less than 1e-6 may change places.
        best = -np.sort(-asked, 1)[:, : query.top_k]
        np.testing.assert_allclose(answer.top_logprobs, best, **near)
        differs = answer.top_ids != np.argsort(-asked, 1, kind="stable")[:, : query.top_k]
        assert (np.abs(np.take_along_axis(asked, answer.top_ids, 1) - best)[differs] < 1e-6).all()
    if query.given is not None:
        given = query.given[: len(targets)] if query.given.ndim == 2 else np.tile(query.given, (len(targets), 1))
        want = np.where(given < 0, 0, np.take_along_axis(asked, np.maximum(given, 0), 1))
        np.testing.assert_allclose(answer.given_logprobs, want, **near)
    if query.with_next:
        assert answer.next_ids is not None and answer.next_ids[0] == table[-1].argmax()
        np.testing.assert_allclose(answer.next_logprobs, table[-1][answer.next_ids], **near)
