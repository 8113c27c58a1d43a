"""Rewards less those of the data set's own outputs, which come again with every epoch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from guerdon.client import Scores
from guerdon.errors import ServerFault

_MOST_KEPT = 100_000
"""Rewards of originals that are remembered, a few bytes each."""
_TRIES = 5
"""How often is asked anew where the server takes new weights between samples and originals."""


class Originals:
    """Asks for an original's reward once under the same weights; not for several threads at once."""

    def __init__(self, score: Callable[[Sequence[str]], Scores]) -> None:
        """`score` gives every text a reward, or raises."""
        self._score = score
        self._rewards: OrderedDict[bytes, np.float32] = OrderedDict()
        self._weights_version: str | None = None

    def less(self, samples: Sequence[str], originals: Sequence[str]) -> np.ndarray:
        """Each sample's reward less its original's, float32 `[B]`, both by the same weights.

        Raises ServerFault where the weights were others at every try, and what `score` raises.
        """
        for _ in range(_TRIES):
            scores = self._ask(samples)
            rewards = self._of_originals(originals)
            if self._weights_version == scores.weights_version:
                return scores.rewards - rewards
        raise ServerFault(f"samples and originals were scored by different weights, {_TRIES} times in a row")

    def _of_originals(self, texts: Sequence[str]) -> np.ndarray:
        known, digests = self._rewards, [_digest(text) for text in texts]
        texts_of = dict(zip(digests, texts, strict=True))
        while missing := [digest for digest in texts_of if digest not in known]:
            scores = self._ask([texts_of[digest] for digest in missing])
            known.update(zip(missing, scores.rewards, strict=True))
        rewards = np.array([known[digest] for digest in digests], np.float32)
        for digest in texts_of:
            known.move_to_end(digest)
        while len(known) > _MOST_KEPT:
            known.popitem(last=False)
        return rewards

    def _ask(self, texts: Sequence[str]) -> Scores:
        scores = self._score(texts)
        if scores.weights_version != self._weights_version:
            self._rewards.clear()
            self._weights_version = scores.weights_version
        return scores


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
