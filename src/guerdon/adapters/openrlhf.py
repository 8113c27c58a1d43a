"""OpenRLHF's reward function, for `--reward.remote_url my_reward.py` (older: `--remote_rm_url`).

    from guerdon.adapters.openrlhf import reward_function
    reward_func = reward_function("http://host:5555")

OpenRLHF has no word for a sample without a reward, so a failed one raises; as OpenRLHF does not show what was raised
when it then stops, it is also logged. With the server's URL in place of the file it asks `/get_reward` by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, judge
from guerdon.adapters.samples import components_of
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import GuerdonError
from guerdon.messages import ended
from guerdon.wire.score_tensors import prompt_groups

log = logging.getLogger(__name__)


class RewardFunction:
    """Asks a served model for the rewards of whole texts; from any thread. It can be pickled."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        ending: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Completes each text to `ending`, such as ChatML's whole one; gives a call up after `timeout_s`."""
        self._judge, self._ending = judge(url, model, timeout_s), ending

    def __call__(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
        """The rewards of `queries`, each a prompt and its response with their special tokens, and their components'.

        Models that take prompts and labels are told them, unless these lists are empty. Raises SampleFailed where a
        sample has no reward, and GuerdonError where the server cannot be asked.
        """
        if not len(queries):
            return {"rewards": [], "scores": [], "extra_logs": {}}
        texts = [ended(query, self._ending) for query in queries]
        samples: ScoreArgs = {"texts": texts, "labels": labels if len(labels) else None}
        if len(prompts):
            samples |= {"prompts": prompts, "groups": prompt_groups(list(prompts))}
        try:
            scores = self._judge.score(**samples)
            rewards = scores.raise_for_failed().rewards.tolist()
        except GuerdonError as e:
            log.error("no reward: %s", e)
            raise
        components = {name: values.tolist() for name, values in components_of(scores).items()}
        return {"rewards": rewards, "scores": rewards, "extra_logs": components}


reward_function = RewardFunction
