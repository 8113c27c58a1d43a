"""The adapters of reward functions, each called as its trainer calls it; imports nothing heavy."""

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from guerdon.adapters import areal, openrlhf, trl, verl

FORMS: dict[str, Callable[..., Any]] = {  # a function as its trainer has it, of the URL
    "trl": trl.reward_function,
    "trl, async": trl.async_reward_function,
    "openrlhf": openrlhf.reward_function,
    "verl": lambda url, **settings: partial(verl.compute_score, url=url, **settings),
    "verl, async": lambda url, **settings: partial(verl.compute_score_async, url=url, **settings),
    "areal": areal.reward_function,
    "areal, async": areal.async_reward_function,
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
    else:
        reward = function(text, "", [1], [2], question=text)
    if inspect.iscoroutine(reward):
        reward = run(reward)
    for key in {"trl": [0], "openrlhf": ["rewards", 0], "verl": ["score"]}.get(trainer, []):
        reward = reward[key]
    return reward
