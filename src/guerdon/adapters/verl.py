"""verl's reward manager and its reward functions, which its config names:

    reward.reward_manager.source=importlib
    reward.reward_manager.module.path=pkg://guerdon.adapters.verl
    reward.reward_manager.name=RewardManager
    +reward.reward_kwargs.url=http://host:5555

or, with the manager that verl has for functions,

    reward.custom_reward_function.path=pkg://guerdon.adapters.verl
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.url=http://host:5555

The manager gets each sample's prompt; verl gives a function the response only, so that it needs the prompt in the
sample's `extra_info`. A sample without a reward raises and ends the run; only verl's manager `rate_limited` turns it
into 0.0, as its own time-outs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, Prompt, judge, make_samples, only_reward, refuse_unknown
from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.messages import answered

_OF_VERL = {"reward_router_address", "reward_model_tokenizer"}  # for a reward model that verl itself runs
_OF_MANAGER = ("url", "model", "timeout_s")


class RewardManager:
    """verl's reward manager: scores each response as the answer to its sample's prompt, by the server's chat template.

    The data set stays as verl's own preprocessing writes it: `prompt`, `data_source`, and `reward_model` with its
    `ground_truth`, which is the label for models that take labels. Settings are in `reward.reward_kwargs`.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **by_verl: Any) -> None:
        """Raises ConfigError for a missing or unknown setting; connects at the first score."""
        settings = dict(config.reward.get("reward_kwargs") or {})
        refuse_unknown(settings.keys() - {*_OF_MANAGER}, "reward.reward_kwargs.", ", ".join(_OF_MANAGER))
        if "url" not in settings:
            raise ConfigError("reward.reward_kwargs.url is not given", "add +reward.reward_kwargs.url=http://host:5555")
        url = settings["url"]
        self._judge = judge(
            url if isinstance(url, str) else [*url],
            settings.get("model", "reward_model"),
            settings.get("timeout_s", TIMEOUT_S),
        )
        self._tokenizer = tokenizer

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Returns `reward_score`, and in `reward_extra_info` the score and each component, for one trajectory.

        `data` is verl's DataProto; of several sequences the last counts, as in verl's own managers. Raises SampleFailed
        without a reward, and GuerdonError if the server cannot be reached in time.
        """
        sample = data[-1:][0]
        ids, about = sample.batch["responses"], sample.non_tensor_batch
        num_tokens = int(sample.batch["attention_mask"][-len(ids) :].sum())
        # In a thread, because many responses are decoded in one event loop.
        response = await asyncio.to_thread(self._tokenizer.decode, ids[:num_tokens], skip_special_tokens=True)
        if "raw_prompt" not in about:
            raise InvalidRequest("verl's batch has no raw_prompt: use verl 0.7.1 or newer, or set data.return_raw_chat")
        label = (about.get("reward_model") or {}).get("ground_truth")
        scores = await self._judge.score_async(**_to_args(about["raw_prompt"], response, label))
        components = _flatten(scores)
        return {"reward_score": components["score"], "reward_extra_info": components}

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """Returns the batch's rewards as verl's own managers do: `[B, T]`, each at its response's last token."""
        from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

        return RewardManagerBase.assemble_rm_scores(data, scores)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str | Sequence[str],
    model: str = "reward_model",
    prompt_key: str = "prompt",
    ending: str | None = None,
    timeout_s: float = TIMEOUT_S,
    **by_verl: Any,
) -> dict[str, float]:
    """Returns `score`, the reward, and each component, which verl keeps as columns.

    The prompt is `extra_info[prompt_key]`: messages, which the server formats, or a text, to which the response is
    appended. A last message of the assistant's begins the response. A text that the served model's chat template has
    made ends as it ends an answer; `ending` replaces that, such as the EOS that verl strips.
    `ground_truth` goes to models that take labels. Raises SampleFailed without a reward, and GuerdonError if the
    server cannot be reached within `timeout_s`.
    """
    sample = _make_sample(solution_str, ground_truth, extra_info or {}, prompt_key, ending, by_verl)
    return _flatten(judge(url, model, timeout_s).score(completes=ending is None, **sample))


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str | Sequence[str],
    model: str = "reward_model",
    prompt_key: str = "prompt",
    ending: str | None = None,
    timeout_s: float = TIMEOUT_S,
    **by_verl: Any,
) -> dict[str, float]:
    """Returns what `compute_score` returns, without a thread for each sample under way."""
    sample = _make_sample(solution_str, ground_truth, extra_info or {}, prompt_key, ending, by_verl)
    return _flatten(await judge(url, model, timeout_s).score_async(completes=ending is None, **sample))


def _make_sample(
    response: str, label: Any, about: Mapping[str, Any], key: str, ending: str | None, more: Any
) -> ScoreArgs:
    refuse_unknown(more.keys() - _OF_VERL, "reward_kwargs.", "url, model, prompt_key, ending, timeout_s")
    if key not in about:
        raise InvalidRequest(
            f"extra_info has no {key!r}, only {', '.join(about) or 'nothing'}: write the prompt there when "
            "you make the data set, or name its key by reward_kwargs.prompt_key"
        )
    return _to_args(about[key], response, label, ending)


def _to_args(prompt: Any, response: str, label: Any, ending: str | None = None) -> ScoreArgs:
    completion: Prompt = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
    sample: ScoreArgs = {**make_samples([prompt], [completion], ending), "labels": [label]}
    return sample if isinstance(prompt, str) else {**sample, "messages": [answered(prompt, response)]}


def _flatten(scores: Scores) -> dict[str, float]:
    reward, components = only_reward(scores)
    return {**components, "score": reward}
