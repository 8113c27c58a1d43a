"""Asks all components of a sum of rewards at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from guerdon.core import ScoreReply
from guerdon.errors import Overloaded, named


async def score_all(
    components: Iterable[str], score: Callable[[str], Coroutine[Any, Any, ScoreReply]]
) -> list[ScoreReply]:
    """Returns each component's reply; if one refuses, the others drop the request, and its error is raised."""

    async def ask(component: str) -> ScoreReply:
        try:
            return await score(component)
        except Overloaded as e:
            raise named(component, e) from e

    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for component in components:
                tasks.append(group.create_task(ask(component)))
                await asyncio.sleep(0)  # so that other requests have their turn between a large one's components
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
    return [task.result() for task in tasks]
