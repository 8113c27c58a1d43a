"""Samples tokens from logits by each rollout's own random numbers, and finds stop texts.

Legend: B rollouts, V logits of a token.

Distributions are truncated as by transformers' logits processors, in their order: repetition penalty, no EOS before
`min_new_tokens`, temperature, top_k, top_p. A token is sampled by inverting the cumulative distribution at one uniform
number: Gumbel noise would take V numbers per token, and this ties a rollout's samples to its own numbers and logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.actor.rollouts import decode
from guerdon.errors import ConfigError, RunFailed
from guerdon.settings.actors import RolloutConfig

BLOCK = 64
"""Probabilities are summed in blocks before they are searched; the vocabulary's square root is fastest."""


def uniforms(seed: Sequence[int], group: int, index: int, count: int) -> np.ndarray:
    """Returns the random numbers of a rollout in [0, 1), float64 `[count]`; a function of its seed, group and index."""
    bits = np.random.Philox(np.random.SeedSequence([*seed, group, index]))
    return np.random.Generator(bits).random(count)


class Sampler:
    """Samples the next token of each rollout, or with `greedy` takes the most likely one."""

    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], *, greedy: bool = False) -> None:
        self._config, self._greedy = config, greedy
        self._eos_token_ids = list(eos_token_ids)

    @property
    def penalises(self) -> bool:
        """Whether it needs to know the tokens so far."""
        return self._config.repetition_penalty != 1.0

    def __call__(
        self, logits: Tensor, numbers: Tensor, num_new: Tensor, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens int64 `[B]` for logits `[B,V]`, and their untruncated log-probs float32 `[B]` at the
        temperature.

        `numbers` float64 `[B]` are uniform, `num_new` int64 `[B]` counts the response's tokens so far, `seen` bool
        `[B,V]` marks the tokens of prompt and response so far, if the sampler `penalises`. Raises RunFailed if logits
        are not finite.
        """
        logits = logits.float()
        config = self._config
        scaled = logits if config.temperature == 1.0 else logits / config.temperature
        top = scaled.amax(-1, keepdim=True)
        weights = torch.exp(scaled - top)
        totals = weights.sum(-1)
        if not bool(torch.isfinite(totals).all()):
            raise RunFailed("the policy's logits are not finite: it has diverged; lower policy.learning_rate")
        changed = self._penalise(logits, num_new, seen)
        if self._greedy:
            tokens = changed.argmax(-1)
        elif changed is logits:
            tokens = sample_indices(weights, numbers)
        else:
            changed = self._truncate(changed / config.temperature)
            tokens = sample_indices(torch.exp(changed - changed.amax(-1, keepdim=True)), numbers)
        return tokens, (scaled.gather(1, tokens[:, None]) - top)[:, 0] - totals.log()

    def _penalise(self, logits: Tensor, num_new: Tensor, seen: Tensor | None) -> Tensor:
        """Applies the processors before the temperature; returns `logits` itself if no processor is active."""
        config = self._config
        changed = logits
        if self.penalises:
            assert seen is not None
            penalty = config.repetition_penalty
            changed = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        early = num_new < config.min_new_tokens
        if self._eos_token_ids and bool(early.any()):
            changed = changed.clone()
            changed[:, self._eos_token_ids] = changed[:, self._eos_token_ids].masked_fill(early[:, None], -math.inf)
        truncates = config.top_k > 0 or config.top_p < 1.0
        return logits.clone() if truncates and changed is logits else changed

    def _truncate(self, scaled: Tensor) -> Tensor:
        """Sets logits outside top_k and top_p to -inf; the most likely token always stays."""
        config = self._config
        if config.top_k > 0:
            least = scaled.topk(min(config.top_k, scaled.shape[-1]), -1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if config.top_p < 1.0:
            ascending, order = scaled.sort(-1)
            out = ascending.softmax(-1).cumsum(-1) <= 1 - config.top_p
            out[:, -1] = False
            scaled = scaled.masked_fill(out.scatter(1, order, out), -math.inf)
        return scaled


def sample_indices(weights: Tensor, numbers: Tensor) -> Tensor:
    """Returns for each row the index int64 `[B]` at which the running sum of float32 weights `[B,V]` passes its number.

    `numbers` float64 `[B]` in [0, 1) are fractions of the row's sum, which must be above 0. An index of weight 0 is
    never taken. The running sum is taken over blocks, and then within one block, in float64.
    """
    blocks = F.pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    block, rest = _search(sums, numbers * sums.sum(-1))
    chosen = blocks[torch.arange(len(blocks), device=blocks.device), block].double()
    return block * BLOCK + _search(chosen, rest)[0]


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's first index whose running sum exceeds the target, and the target minus the sum before it."""
    running = weights.cumsum(-1)
    # Rounding may have moved the target to the end or beyond.
    target = torch.minimum(target, running[:, -1].nextafter(running.new_zeros(())))[:, None].clamp_min(0)
    index = torch.searchsorted(running, target, right=True)
    return index[:, 0], (target - (running.gather(1, index) - weights.gather(1, index)))[:, 0]


class StopTexts:
    """Finds the token that completes a stop text, by decoding the response's own tokens."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        """Raises ConfigError if there is no tokenizer to decode with, or a text is empty."""
        if texts and tokenizer is None:
            raise ConfigError("rollouts.stop has texts, and the policy has no tokenizer", "remove rollouts.stop")
        if "" in texts:
            raise ConfigError("rollouts.stop has an empty text", "remove it")
        self._texts, self._tokenizer = list(texts), tokenizer
        # Almost every token has at least one byte, and a character has at most four tokens.
        self._tail_length = max((len(text.encode()) for text in texts), default=0) + 8
        self._last = {text[-1] for text in texts}
        self._may_end: dict[int, bool] = {}

    def complete(self, tokens: list[int], start: int = 0) -> bool:
        """Whether the last token completes a stop text of tokens from `start`, given that none was completed before."""
        if not self._texts or not self._may_end_in(tokens[-1]):
            return False
        tail = decode(self._tokenizer, tokens[max(start, len(tokens) - self._tail_length) :])
        return any(text in tail for text in self._texts)

    def _may_end_in(self, token: int) -> bool:
        """Whether the token may contain a stop text's last character; decoding every tail would take longer than a
        step.

        Decoded alone, a token may lose blanks at its ends or be a part of a character.
        """
        known = self._may_end.get(token)
        if known is None:
            alone = decode(self._tokenizer, [token])
            known = self._may_end[token] = (
                not alone.strip() or "\ufffd" in alone or any(last.isspace() or last in alone for last in self._last)
            )
        return known
