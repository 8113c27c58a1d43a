"""What the rows of a request have in common in every protocol: the groups of their prompts, and their scores."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from guerdon.core import Score, ScoreReply
from guerdon.errors import GuerdonError, InvalidRequest, named

MAX_ROWS = 1 << 20
"""More samples than one body may have, whatever the server's own limit: each takes much more memory than it sends."""


def check_count(count: int, what: str) -> None:
    """Raises InvalidRequest where there are more samples, or texts, than one body may have."""
    if count > MAX_ROWS:
        raise InvalidRequest(f"{what} has {count:,} entries, at most {MAX_ROWS:,} are taken; send fewer in a request")


def groups_of(prompts: Iterable[str]) -> np.ndarray:
    """The group of each prompt, int64.

    A prompt has the same in whatever request and from whatever process it comes, since some trainers send every
    rollout in one of its own.
    """
    prompts = list(prompts)
    # A prompt of many responses is read once. What is no proper text is the encoder's to refuse.
    groups = {prompt: zlib.crc32(prompt.encode("utf-8", "surrogatepass")) for prompt in dict.fromkeys(prompts)}
    return np.array([groups[prompt] for prompt in prompts], np.int64)


def scores_of(reply: ScoreReply) -> list[Score]:
    """The reply's scores; raises the first failed row's error, its text prefixed with the row."""
    scores = []
    for i, result in enumerate(reply.results):
        if isinstance(result, GuerdonError):
            raise named(f"row {i}", result)
        scores.append(result)
    return scores
