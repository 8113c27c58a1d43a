"""verl's reward functions, which its config names:

    reward.custom_reward_function.path=pkg://guerdon.adapters.verl
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.url=http://host:5555

verl gives a reward function the response but not its prompt, which comes from the sample's `extra_info`. A sample
without a reward raises and ends the run; only the manager `rate_limited` turns it into 0.0, as its own time-outs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, Prompt, judge, make_samples, named_components, refuse_unknown
from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import InvalidRequest
from guerdon.messages import answered

_OF_VERL = {"reward_router_address", "reward_model_tokenizer"}  # for a reward model that verl itself runs


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str | Sequence[str],
    model: str = "reward_model",
    prompt_key: str = "prompt",
    suffix: str = "",
    timeout_s: float = TIMEOUT_S,
    **by_verl: Any,
) -> dict[str, float]:
    """Returns `score`, the reward, and each component, of which verl keeps a column each.

    The prompt is `extra_info[prompt_key]`: a text, to which the response and `suffix` are appended, such as the EOS
    that verl strips; or messages, which the server formats. A last message of the assistant's begins the response.
    `ground_truth` goes to models that take labels. Raises SampleFailed without a reward, and GuerdonError if the
    server cannot be reached within `timeout_s`.
    """
    sample = _make_sample(solution_str, ground_truth, extra_info or {}, prompt_key, suffix, by_verl)
    return _flatten(judge(url, model, timeout_s).score(**sample))


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str | Sequence[str],
    model: str = "reward_model",
    prompt_key: str = "prompt",
    suffix: str = "",
    timeout_s: float = TIMEOUT_S,
    **by_verl: Any,
) -> dict[str, float]:
    """Returns what `compute_score` returns, without a thread for each sample under way."""
    sample = _make_sample(solution_str, ground_truth, extra_info or {}, prompt_key, suffix, by_verl)
    return _flatten(await judge(url, model, timeout_s).score_async(**sample))


def _make_sample(response: str, label: Any, about: Mapping[str, Any], key: str, suffix: str, more: Any) -> ScoreArgs:
    refuse_unknown(more.keys() - _OF_VERL, "reward_kwargs.", "url, model, prompt_key, suffix, timeout_s")
    if key not in about:
        raise InvalidRequest(
            f"extra_info has no {key!r}, only {', '.join(about) or 'nothing'}: write the prompt there when "
            "you make the data set, or name its key by reward_kwargs.prompt_key"
        )
    prompt = about[key]
    completion: Prompt = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
    sample: ScoreArgs = {**make_samples([prompt], [completion], suffix), "labels": [label]}
    return sample if isinstance(prompt, str) else {**sample, "messages": [answered(prompt, response)]}


def _flatten(scores: Scores) -> dict[str, float]:
    reward = float(scores.raise_for_failed().rewards[0])
    return {**{name: float(values[0]) for name, values in named_components(scores).items()}, "score": reward}
