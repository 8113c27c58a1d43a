"""verl's own reward managers, for the samples of a JSON file.

    drive_verl.py loop FILE.py SAMPLES KWARGS NAME       the reward loop's naive manager, with a function of a file
    drive_verl.py classic FILE.py SAMPLES KWARGS NAME    the older NaiveRewardManager, likewise
    drive_verl.py vllm|sglang HOST:PORT SAMPLES          the reward loop's requests to a reward model's server
    drive_verl.py manager FLAGS SAMPLES TOKENIZER        the whole reward loop, on Ray, with the flags of its command

In place of a tokenizer stands one whose tokens are characters, but for the last. Prints {"rewards": [...], "extra":
{...}}, and for the last also the rewards' places in the responses.
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


def gsm8k(samples: list[dict[str, Any]], tokenizer: Any) -> DataProto:
    """The rollouts of a data set as verl's examples/data_preprocess/gsm8k.py writes it, in the agent loop's shape."""
    prompts = [tokenizer(s["prompt"]).input_ids for s in samples]
    responses = [
        [*tokenizer(s["response"], add_special_tokens=False).input_ids, tokenizer.eos_token_id] for s in samples
    ]
    left, right = max(map(len, prompts)), max(map(len, responses))
    columns: dict[str, list[Any]] = {
        "data_source": ["openai/gsm8k"] * len(samples),
        "raw_prompt": [[{"role": "user", "content": s["prompt"]}] for s in samples],
        "ability": ["math"] * len(samples),
        "reward_model": [{"style": "rule", "ground_truth": s["label"]} for s in samples],
        "extra_info": [{"split": "train", "index": i, "question": s["prompt"]} for i, s in enumerate(samples)],
    }
    objects = {name: np.empty(len(samples), dtype=object) for name in columns}
    for name, values in columns.items():
        objects[name][:] = values
    mask = [
        [0] * (left - len(p)) + [1] * (len(p) + len(r)) + [0] * (right - len(r))
        for p, r in zip(prompts, responses, strict=True)
    ]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0] * (left - len(ids)) + ids for ids in prompts]),
            "responses": torch.tensor([ids + [0] * (right - len(ids)) for ids in responses]),
            "attention_mask": torch.tensor(mask),
        },
        non_tensors=objects,
    )


def manager(flags: list[str], samples: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    import ray
    from hydra import compose, initialize_config_module
    from transformers import AutoTokenizer
    from verl.experimental.reward_loop import RewardLoopManager, migrate_legacy_reward_impl

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*flags, f"actor_rollout_ref.model.path={folder}", "reward.num_workers=2"])
    ray.init(num_cpus=2, include_dashboard=False)
    batch = gsm8k(samples, tokenizer)
    told = RewardLoopManager(migrate_legacy_reward_impl(config)).compute_rm_score(batch)
    ray.shutdown()
    rewards = told.batch["rm_scores"]
    return {
        "rewards": rewards.sum(1).tolist(),
        "places": [row.nonzero().flatten().tolist() for row in rewards],
        "last": (batch.batch["attention_mask"][:, -rewards.shape[1] :].sum(1) - 1).tolist(),
        "extra": {name: told.non_tensor_batch[name].tolist() for name in told.meta_info["reward_extra_keys"]},
    }


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
        samples = json.load(file)
    batch = batch_of(samples)
    if kind == "manager":
        told = manager(json.loads(target), samples, sys.argv[4])
    elif kind in ("vllm", "sglang"):
        told = asyncio.run(served(settings(None, {}, "", kind), batch, target))
    else:
        config = settings(target, json.loads(sys.argv[4]), sys.argv[5])
        told = asyncio.run(loop(config, batch)) if kind == "loop" else classic(config, batch)
    print(json.dumps(told, default=float))
