"""A causal language model's log-probs of given tokens, through the packed forward and with gradients.

Legend: T tokens, H hidden size, V logits of a token, N chosen tokens, B sequences, R tokens of the longest response.

With `log_softmax`, `gather` and a product for the entropies PyTorch would make up to three more tables of N x V numbers
in the forward and two in the backward pass, each written to memory and read again. `token_logprobs` takes a few rows
all the way at once, inside the processor's caches, and keeps only the logits: the backward pass turns them into the
gradient, the only other table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.forward import Forward, HiddenStates
from guerdon.engine.self_check import choose_path

TABLE = 1 << 26
"""Logits held at once, 256 MiB in float32: more tokens are taken in chunks, each recomputed in the backward pass."""
CACHED = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits that are worked on at once: on a CPU as many as fit into its caches, on a GPU enough to keep it busy."""

IMPOSSIBLE = -200.0
"""A log-prob below which the probability is 0 in float32; 0 x -inf would be NaN."""


class LanguageEngine(Forward):
    """One causal language model: the log-probs that it gives to the tokens of responses."""

    def __init__(self, loaded: LoadedPolicy, *, reads_last: bool = False) -> None:
        """Raises CheckpointError as `choose_path`; `reads_last` says that only the last token's state is read."""
        self.head, self._model = loaded.head, loaded.model
        super().__init__(loaded)
        choose_path(self, loaded, reads_last=reads_last)

    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the whole model."""
        return (self._model,)

    def seen(self, rows: list[np.ndarray], path: str) -> list[np.ndarray]:
        """Returns the rows without their last token, whose state nobody reads, if the path allows it.

        A row of one token only keeps its place.
        """
        if self.needs_last(path):
            return rows
        return [row[: max(1, len(row) - 1)] for row in rows]

    def logprobs(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float = 1.0,
        *,
        with_entropies: bool = False,
    ) -> Iterator[tuple[np.ndarray, Tensor, Tensor | None]]:
        """Yields row numbers int64 `[b]`, log-probs of their responses, and their entropies, for each micro-batch.

        Both are float32 `[b,R]` on the device, entry r for the response's token r, 0 beyond the response; R is that of
        all rows. Logits are divided by the temperature, and the log-sum-exp is float32. The graph is attached if
        gradients are enabled: call backward before taking the next micro-batch, because only one fits into the token
        budget. `prompt_lengths` is int64 `[B]`; raises ValueError if one is 0, because nothing predicts a first token.

        If `ranks.in_step`, fillers at the end have no rows and log-probs `[0,R]`; call backward for them, too.
        """
        if len(rows) and min(prompt_lengths) < 1:
            raise ValueError("prompt_lengths has a 0: a response needs at least one token before it")
        width = max((len(row) - int(start) for row, start in zip(rows, prompt_lengths, strict=True)), default=0)
        for states in self.run(self.plan(self.seen(rows, self.path))):
            members = np.array(states.rows, dtype=np.int64)
            if not states.rows:
                nothing = self.head(states.hidden[:1]).float().sum() * 0
                yield members, torch.zeros(0, width, device=self.device) + nothing, None
                continue
            at, targets, is_response = self._response_indices(states, rows, prompt_lengths, width)
            hidden = states.hidden[at]
            logprobs, entropies = self._in_chunks(hidden, targets, temperature, with_entropies)
            empty = torch.zeros(is_response.shape, device=self.device)
            tables = [None if x is None else empty.masked_scatter(is_response, x) for x in (logprobs, entropies)]
            assert tables[0] is not None
            yield members, tables[0], tables[1]

    def _response_indices(
        self, states: HiddenStates, rows: list[np.ndarray], prompt_lengths: np.ndarray, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns indices of the states that predict the response's tokens, these tokens, both int64 `[N]`, and where
        they go in a table, bool `[b,R]`."""
        at, targets = [], []
        is_response = np.zeros((len(states.rows), width), dtype=bool)
        for i, number in enumerate(states.rows):
            row, start = rows[number], int(prompt_lengths[number])
            at.append(states.gather(i)[start - 1 : len(row) - 1])
            targets.append(row[start:])
            is_response[i, : len(row) - start] = True
        found = self.to_device(np.concatenate(at)), self.to_device(np.concatenate(targets).astype(np.int64, copy=False))
        return *found, self.to_device(is_response)

    def _in_chunks(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs and entropies, float32 `[N]`, in chunks of at most TABLE logits."""
        size = max(1, TABLE // self._model.get_input_embeddings().num_embeddings)

        def logprobs_of(some: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
            return token_logprobs(self.head(some), wanted, temperature, with_entropies=with_entropies)

        if len(hidden) <= size:
            return logprobs_of(hidden, targets)
        chunks = []
        for part in zip(hidden.split(size), targets.split(size), strict=True):
            if torch.is_grad_enabled():
                # Heads have no dropout, so no random state to preserve.
                chunks.append(checkpoint(logprobs_of, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                chunks.append(logprobs_of(*part))
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if with_entropies else None


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, with_entropies: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probs of targets, int64 `[N]`, by logits `[N,V]` over the temperature, and entropies or None.

    Both are float32 `[N]`, whatever the logits' dtype, and differentiable once.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, temperature, with_entropies)
    return logprobs, entropies if with_entropies else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(logprobs) if with_entropies else None
        normalisers = torch.empty_like(logprobs)
        for rows in row_slices(logits):
            part = scale(logits[rows], temperature)
            table = torch.log_softmax(part, -1)
            # From the largest logit: the target's own may be -inf.
            normalisers[rows] = part.amax(-1) - table.amax(-1)
            logprobs[rows] = table.gather(1, targets[rows, None])[:, 0]
            if entropies is not None:
                entropies[rows] = entropies_of(table)
        ctx.save_for_backward(logits, targets, normalisers, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, entropy_slopes: Tensor | None) -> tuple[Tensor, None, None, None]:
        """With p the softmax, e the one-hot target and H the entropy: slope (e - p) - entropy slope p (log p + H)."""
        logits, targets, normalisers, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        slopes = (slopes / ctx.temperature)[:, None]
        for rows in row_slices(logits):
            table = scale(logits[rows], ctx.temperature) - normalisers[rows, None]
            if entropies is None or entropy_slopes is None:
                part = table.exp_().mul_(-slopes[rows])
            else:
                by_entropy = entropy_slopes[rows, None] / ctx.temperature
                part = table.exp()
                part.mul_(table.clamp_(min=IMPOSSIBLE).add_(entropies[rows, None]).mul_(-by_entropy).sub_(slopes[rows]))
            gradient[rows] = part.scatter_add_(1, targets[rows, None], slopes[rows])
        return gradient, None, None, None


def entropies_of(table: Tensor) -> Tensor:
    """Returns the entropies `[N]` of log-probs `[N,V]`, with the same bits among any rows and with any threads."""
    terms = table.exp().mul_(table.clamp(min=IMPOSSIBLE))
    return -_sums(terms)


def log_sums(table: Tensor) -> Tensor:
    """Returns the logarithms `[N]` of the sums of what a table `[N,V]` has the logarithms of, -inf for a sum of 0.

    They have the same bits among any rows and with any threads.
    """
    largest = table.amax(-1)
    is_zero = largest == -torch.inf
    sums = _sums((table - largest.masked_fill(is_zero, 0.0)[:, None]).exp_())
    return torch.where(is_zero, largest, largest + sums.log())


def _sums(terms: Tensor) -> Tensor:
    # PyTorch splits the sum of a single long row among threads, but gives each of several rows to one thread.
    return (terms.expand(2, -1) if len(terms) == 1 else terms).sum(-1)[: len(terms)]


def scale(logits: Tensor, temperature: float) -> Tensor:
    """Returns the logits in float32, divided by the temperature."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def row_slices(logits: Tensor) -> Iterator[slice]:
    """Yields slices of as many rows as are worked on at once."""
    size = max(1, CACHED.get(logits.device.type, 1 << 24) // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
