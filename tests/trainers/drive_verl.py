"""verl's own reward managers, for the samples of a JSON file.

    drive_verl.py loop FILE.py SAMPLES KWARGS NAME       the reward loop's naive manager, with a function of a file
    drive_verl.py classic FILE.py SAMPLES KWARGS NAME    the older NaiveRewardManager, likewise
    drive_verl.py vllm|sglang HOST:PORT SAMPLES          the reward loop's requests to a reward model's server

In place of a tokenizer stands one whose tokens are characters. Prints {"rewards": [...], "extra": {...}}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto


class Characters:
    eos_token, bos_token, pad_token_id = "", None, 0

    def decode(self, ids: Any, **_: object) -> str:
        return "".join(chr(int(i)) for i in ids)

    def apply_chat_template(self, chat: list[dict[str, str]], **_: object) -> str:
        return "".join(message["content"] for message in chat)


def batch_of(samples: list[dict[str, Any]]) -> DataProto:
    width = max(max(len(s["prompt"]), len(s["response"])) for s in samples)

    def row(text: str, *, left: bool) -> tuple[list[int], list[int]]:
        ids, padding = [ord(character) for character in text], [0] * (width - len(text))
        mask = [1] * len(ids)
        return (padding + ids, padding + mask) if left else (ids + padding, mask + padding)

    prompts = [row(s["prompt"], left=True) for s in samples]
    responses = [row(s["response"], left=False) for s in samples]
    prompt_ids, response_ids = (torch.tensor([ids for ids, _ in rows]) for rows in (prompts, responses))
    mask = torch.tensor([p + r for (_, p), (_, r) in zip(prompts, responses, strict=True)])
    messages = np.empty(len(samples), dtype=object)
    messages[:] = [[{"role": "user", "content": s["prompt"]}] for s in samples]
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": response_ids,
            "attention_mask": mask,
            "input_ids": torch.cat([prompt_ids, response_ids], 1),
        },
        non_tensors={
            "data_source": np.array(["reviews"] * len(samples), dtype=object),
            "reward_model": np.array([{"ground_truth": s["label"], "style": "rule"} for s in samples], dtype=object),
            "extra_info": np.array([{"index": i, "prompt": s["prompt"]} for i, s in enumerate(samples)], dtype=object),
            "raw_prompt": messages,
        },
    )


def settings(path: str | None, kwargs: dict[str, Any], name: str, engine: str = "vllm") -> Any:
    return OmegaConf.create(
        {
            "reward": {
                "num_workers": 1,
                "reward_manager": {"source": "register", "name": "naive", "module": None},
                "custom_reward_function": {"path": path, "name": name, "reward_kwargs": kwargs},
                "reward_model": {"enable": path is None, "model_path": "", "rollout": {"name": engine}},
            }
        }
    )


async def loop(config: Any, batch: DataProto) -> dict[str, Any]:
    from verl.trainer.ppo.reward import load_reward_manager

    manager = load_reward_manager(config, Characters())
    manager.loop = asyncio.get_running_loop()
    outcomes = await asyncio.gather(*(manager.run_single(batch[i : i + 1]) for i in range(len(batch))))
    extra = [o["reward_extra_info"] for o in outcomes]
    return {
        "rewards": [o["reward_score"] for o in outcomes],
        "extra": {name: [info[name] for info in extra] for name in extra[0]},  # as verl gathers them
    }


def classic(config: Any, batch: DataProto) -> dict[str, Any]:
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.workers.reward_manager import NaiveRewardManager

    told = NaiveRewardManager(Characters(), 0, get_custom_reward_fn(config))(batch, return_dict=True)
    return {"rewards": told["reward_tensor"].sum(1).tolist(), "extra": dict(told["reward_extra_info"])}


async def served(config: Any, batch: DataProto, address: str) -> dict[str, Any]:
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    worker = object.__new__(RewardLoopWorker)  # its __init__ starts a cluster
    worker.config, worker.reward_router_address = config, address
    worker.input_tokenizer = worker.reward_model_tokenizer = Characters()
    outcomes = await worker.compute_score_batch(batch)
    return {"rewards": [o["reward_score"] for o in outcomes], "extra": {}}


if __name__ == "__main__":
    kind, target, path = sys.argv[1:4]
    with open(path) as file:
        batch = batch_of(json.load(file))
    if kind in ("vllm", "sglang"):
        told = asyncio.run(served(settings(None, {}, "", kind), batch, target))
    else:
        config = settings(target, json.loads(sys.argv[4]), sys.argv[5])
        told = asyncio.run(loop(config, batch)) if kind == "loop" else classic(config, batch)
    print(json.dumps(told, default=float))
