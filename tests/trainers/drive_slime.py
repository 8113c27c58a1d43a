"""slime's own way to a reward, for the samples of a JSON file: `drive_slime.py CHECKOUT URL SAMPLES [KEY]`.

Prints {"rewards": [...]}, what `async_rm` gives for each sample as `Sample.get_reward_value` reads it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, sys.argv[1])

from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample


async def drive(url: str, samples: list[dict[str, Any]], key: str | None) -> list[float]:
    args = SimpleNamespace(rm_type="remote_rm", rm_url=url, custom_rm_path=None, reward_key=key)
    asked = [Sample(prompt=s["prompt"], response=s["response"], label=s["label"]) for s in samples]
    for sample, reward in zip(asked, await asyncio.gather(*(async_rm(args, s) for s in asked)), strict=True):
        sample.reward = reward
    return [sample.get_reward_value(args) for sample in asked]


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        samples = json.load(file)
    print(json.dumps({"rewards": asyncio.run(drive(sys.argv[2], samples, *sys.argv[4:5] or [None]))}))
