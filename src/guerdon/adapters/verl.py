"""verl's reward functions, which its config names:

    reward.custom_reward_function.path=pkg://guerdon.adapters.verl
    reward.custom_reward_function.name=compute_score_async
    +reward.custom_reward_function.reward_kwargs.url=http://host:5555

verl tells a reward function the response but not its prompt, which is taken from the sample's `extra_info`. A sample
without a reward raises and ends the run; only the manager `rate_limited` makes 0.0 of it, as of its own time-outs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, judge
from guerdon.adapters.samples import Prompt, components_of, refuse_unknown, samples_of
from guerdon.client import Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import InvalidRequest
from guerdon.messages import answered

_OF_VERL = {"reward_router_address", "reward_model_tokenizer"}  # about a reward model that verl itself runs


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
    """`score`, the reward, and beside it each component's, of which verl keeps a column each.

    The prompt is `extra_info[prompt_key]`: a text, after which the response stands and the `suffix` (as the EOS, which
    verl strips), or messages, which the server formats; a last one of the assistant's is the response's beginning.
    `ground_truth` is told to models that take labels. Raises SampleFailed where there is no reward, and GuerdonError
    where the server cannot be asked within `timeout_s`.
    """
    asked = _asked(solution_str, ground_truth, extra_info or {}, prompt_key, suffix, by_verl)
    return _told(judge(url, model, timeout_s).score(**asked))


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
    """`compute_score` without a thread for each sample under way."""
    asked = _asked(solution_str, ground_truth, extra_info or {}, prompt_key, suffix, by_verl)
    return _told(await judge(url, model, timeout_s).score_async(**asked))


def _asked(response: str, label: Any, about: Mapping[str, Any], prompt_key: str, suffix: str, more: Any) -> ScoreArgs:
    refuse_unknown(more.keys() - _OF_VERL, "reward_kwargs.", "url, model, prompt_key, suffix, timeout_s")
    if prompt_key not in about:
        raise InvalidRequest(
            f"extra_info has no {prompt_key!r}, only {', '.join(about) or 'nothing'}: write the prompt there when "
            "you make the data set, or say where it is by reward_kwargs.prompt_key"
        )
    prompt = about[prompt_key]
    completion: Prompt = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
    asked: ScoreArgs = {**samples_of([prompt], [completion], suffix), "labels": [label]}
    return asked if isinstance(prompt, str) else {**asked, "messages": [answered(prompt, response)]}


def _told(scores: Scores) -> dict[str, float]:
    reward = float(scores.raise_for_failed().rewards[0])
    return {**{name: float(values[0]) for name, values in components_of(scores).items()}, "score": reward}
