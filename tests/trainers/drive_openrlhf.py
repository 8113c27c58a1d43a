"""OpenRLHF's own way to a reward, for the samples of a JSON file: `drive_openrlhf.py URL|FILE.py SAMPLES`.

`SingleTurnAgentExecutor.execute` is OpenRLHF's; in place of vLLM, which is not run, stands what vLLM would return, and
in place of a tokenizer one whose tokens are characters. Prints {"rewards": [...], "scores": ..., "extra_logs": ...}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.utils.agent import SingleTurnAgentExecutor


class Characters:
    def __call__(self, text: str, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(character) for character in text]])}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


class Engine:
    def __init__(self, response: str) -> None:
        self._response = response

    async def generate(self, *_: object, **__: object) -> Any:
        ids = [ord(character) for character in self._response]
        output = SimpleNamespace(token_ids=ids, text=self._response, finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


async def drive(url: str, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    executor = SingleTurnAgentExecutor(url.split(","))
    sampling = SimpleNamespace(max_tokens=100_000, logprobs=None)
    return await asyncio.gather(
        *(
            executor.execute(s["prompt"], s["label"], sampling, 1_000_000, Characters(), Engine(s["response"]))
            for s in samples
        )
    )


def plain(value: Any) -> Any:
    return value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else value


def only(value: Any) -> Any:
    value = plain(value)
    return value[0] if isinstance(value, list) else value


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        outcomes = asyncio.run(drive(sys.argv[1], json.load(file)))
    told = {
        "rewards": [only(o["reward"]) for o in outcomes],
        "scores": [only(o["scores"]) for o in outcomes],
        "extra_logs": [{name: only(log) for name, log in (o["extra_logs"] or {}).items()} for o in outcomes],
    }
    print(json.dumps(told))
