"""Work on many bytes, which is done beside the event loop: nobody else would be answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from guerdon.core import ModelInfo, OperationInfo, ScoreReply
from guerdon.wire.operations import Answer

T = TypeVar("T")

INLINE_BYTES = 1 << 20
"""What handles more is called in a thread."""

_NUMBER_BYTES = 4


async def off_loop(work: Callable[[], T], num_bytes: int, inline_bytes: int = INLINE_BYTES) -> T:
    """What `work` returns, which is called in a thread where the `num_bytes` that it handles are many."""
    return work() if num_bytes <= inline_bytes else await asyncio.to_thread(work)


def answer_bytes(answer: Answer, info: ModelInfo | OperationInfo) -> int:
    """About the bytes of an answer's largest table: all its rows are as long as the longest, however short most are.

    0 where it has none but of a few numbers a sample.
    """
    if not isinstance(answer, ScoreReply) or not isinstance(info, ModelInfo):
        return 0
    if not {"values", "step_rewards"} & {*info.outputs}:
        return 0
    return _NUMBER_BYTES * len(answer.results) * max(answer.lengths, default=0)
