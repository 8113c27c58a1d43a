"""OpenRLHF's reward function, for `--reward.remote_url my_reward.py` (older: `--remote_rm_url`).

    from guerdon.adapters.openrlhf import reward_function
    reward_func = reward_function("http://host:5555")

OpenRLHF cannot represent a sample without a reward, so a failed one raises, which stops OpenRLHF; the error is logged
as well, because OpenRLHF does not show it. Given the server's URL instead of the file, OpenRLHF calls `/get_reward`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, judge, named_components
from guerdon.client.reward_client import ScoreArgs
from guerdon.endings import ended
from guerdon.errors import GuerdonError
from guerdon.wire.score_tensors import prompt_groups

log = logging.getLogger(__name__)


class OpenRLHFReward:
    """Asks a served model for the rewards of whole texts, from any thread. It can be pickled."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "reward_model",
        *,
        ending: str | None = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Completes each text with `ending`, None for that of the served model's chat template.

        By default nothing is appended, because OpenRLHF's own reward models are trained on turns that end with the EOS.
        A call fails after `timeout_s`.
        """
        self._judge, self._ending = judge(url, model, timeout_s), ending

    def __call__(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
        """Returns the rewards of `queries`, each a prompt and its response with special tokens, and their components.

        Sends prompts and labels to models that take them, unless these lists are empty. Raises SampleFailed if a sample
        has no reward, and GuerdonError if the server cannot be reached.
        """
        if not len(queries):
            return {"rewards": [], "scores": [], "extra_logs": {}}
        texts = [ended(query, self._ending or "") for query in queries]
        samples: ScoreArgs = {"texts": texts, "labels": labels if len(labels) else None}
        if len(prompts):
            samples |= {"prompts": prompts, "groups": prompt_groups(list(prompts))}
        try:
            scores = self._judge.score(completes=self._ending is None, **samples)
            rewards = scores.raise_for_failed().rewards.tolist()
        except GuerdonError as e:
            log.error("no reward: %s", e)
            raise
        components = {name: values.tolist() for name, values in named_components(scores).items()}
        return {"rewards": rewards, "scores": rewards, "extra_logs": components}


reward_function = OpenRLHFReward
