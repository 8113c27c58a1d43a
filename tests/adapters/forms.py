"""The adapters of rewards, each called as its trainer calls it; imports nothing heavy."""

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from guerdon.adapters import areal, nemo_rl, openrlhf, rewardbench, trl, verl
from guerdon.adapters.judge import TIMEOUT_S, judge

FORMS: dict[str, Callable[..., Any]] = {  # a function as its trainer has it, of the URL
    "trl": trl.reward_function,
    "trl, async": trl.async_reward_function,
    "openrlhf": openrlhf.reward_function,
    "verl": lambda url, **settings: partial(verl.compute_score, url=url, **settings),
    "verl, async": lambda url, **settings: partial(verl.compute_score_async, url=url, **settings),
    "areal": areal.reward_function,
    "areal, async": areal.async_reward_function,
}


def _pipeline(url: str, model: str = "reward_model", timeout_s: float = TIMEOUT_S) -> Any:
    return rewardbench.ServerPipeline(judge(url, model, timeout_s), SimpleNamespace(pad_token_id=0), "texts")


OBJECTS: dict[str, Callable[..., Any]] = {  # what other trainers and evaluations have in place of a function
    "nemo-rl": lambda url, **settings: nemo_rl.RewardEnvironment({"url": url, "send": "texts", **settings}),
    "rewardbench": _pipeline,
}


def ask(name: str, function: Any, text: str, run: Callable[[Any], Any] = asyncio.run) -> Any:
    """The reward of `text`, asked for as the trainer does; `run` gives a coroutine's result."""
    trainer = name.partition(",")[0]
    if trainer == "trl":
        reward = function(prompts=[text], completions=[""], completion_ids=[[1]])
    elif trainer == "openrlhf":
        reward = function([text], [text], [None])
    elif trainer == "verl":
        reward = function(data_source="d", solution_str="", ground_truth=None, extra_info={"prompt": text})
    elif trainer == "nemo-rl":
        log = [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
        reward = function.step([log], [None]).rewards.item()
    elif trainer == "rewardbench":
        reward = function([text], truncation=False)
    else:
        reward = function(text, "", [1], [2], question=text)
    if inspect.iscoroutine(reward):
        reward = run(reward)
    keys = {"trl": [0], "openrlhf": ["rewards", 0], "verl": ["score"], "rewardbench": [0, "score"]}
    for key in keys.get(trainer, []):
        reward = reward[key]
    return reward
