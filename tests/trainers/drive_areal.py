"""AReaL's AsyncRewardWrapper over guerdon's adapter: `drive_areal.py URL SAMPLES [MODEL]`.

Prints {"rewards": [...]}; the wrapper is AReaL's, with its pool of processes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from areal.api.reward_api import AsyncRewardWrapper

from guerdon.adapters.areal import reward_function


async def drive(url: str, samples: list[dict[str, Any]], model: str) -> list[float]:
    reward = AsyncRewardWrapper(reward_function(url, model))
    return await asyncio.gather(
        *(
            reward(s["prompt"], s["response"], [1], [2], label=s["label"], query_id=str(i))
            for i, s in enumerate(samples)
        )
    )


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        samples = json.load(file)
    print(json.dumps({"rewards": asyncio.run(drive(sys.argv[1], samples, *sys.argv[3:4] or ["reward_model"]))}))
