"""What trlX calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guerdon.adapters.trlx.originals import Originals
from guerdon.adapters.trlx.scoring import Scoring
from guerdon.errors import InvalidRequest


class RewardFunction:
    """Callable in every form in which trlX since 0.2 calls its `reward_fn`; raises where a sample gets no reward."""

    def __init__(self, scoring: Scoring, delta_reward: bool, dense: bool) -> None:
        self._scoring, self._is_delta, self._is_dense = scoring, delta_reward, dense
        self._originals = Originals(scoring.of_samples)

    def __call__(
        self,
        samples: Sequence[str],
        prompts: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        *,
        original_output: Sequence[str] | None = None,
        tokenizer: Any = None,
        **metadata: Any,
    ) -> list[float] | list[list[float]]:
        """The samples' rewards; of each output's tokens where they are dense. `tokenizer` is the trainer's."""
        if not len(samples):
            return []
        if self._is_dense:
            if prompts is None or outputs is None:
                raise InvalidRequest("dense rewards need prompts and outputs, which trlX gives since 0.4")
            return self._scoring.of_tokens(prompts, outputs, tokenizer)
        if not self._is_delta:
            return self._scoring.of_samples(samples).rewards.tolist()
        if prompts is None or original_output is None:
            raise InvalidRequest(
                "delta rewards need original_output: train on rows of {'prompt', 'original_output'} with trlX 0.7 or "
                "later by PPO, or create the reward function without delta_reward"
            )
        originals = [prompt + original for prompt, original in zip(prompts, original_output, strict=True)]
        return self._originals.less(samples, originals).tolist()

    def close(self) -> None:
        """Closes the connections, or unloads the model; also done by itself."""
        self._scoring.client.close()
