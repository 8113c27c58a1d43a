"""The reference's log-probs from a teacher's server, requested group by group while other responses are generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

from guerdon.actor.remote_rewards import (
    START_S,
    PendingGroups,
    WeightsLog,
    raise_config_error,
    raise_start_error,
    set_error,
    tokenizer_of,
)
from guerdon.actor.rollouts import Rollout
from guerdon.client import RetryPolicy, TeacherAnswers, TeacherClient
from guerdon.errors import ConfigError, GuerdonError
from guerdon.settings.actors import ReferenceConfig
from guerdon.vocabulary import difference, identity


class RemoteReference:
    """A reference on a server: `submit` a group as soon as it is generated, `collect` at the end.

    Errors and a server that is away are handled as by RemoteRewards: a response without the reference's log-probs
    counts as one without a reward.
    """

    def __init__(self, config: ReferenceConfig, temperature: float) -> None:
        """Asks for log-probs at this temperature; raises ConfigError for a malformed address."""
        self._config, self._temperature = config, temperature
        with raise_config_error("reference.url"):
            self._client = TeacherClient(str(config.url), config.name, policy=RetryPolicy.patient(config.timeout_s))
        self._pending: PendingGroups[TeacherAnswers] = PendingGroups()
        self._weights = WeightsLog("reference", "the KL before and after is not comparable")

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the server; raises StartError if it does not come in time, ConfigError if it is no teacher."""
        what = f"reference '{self._config.name}' at {self._config.url}"
        with raise_start_error(what, "start it with `guerdon serve-teacher`, or correct reference.url and name"):
            self._client.wait_ready(min(START_S, self._config.timeout_s, limit_s))
            outputs = self._client.info().outputs
        if "logprobs" not in outputs:
            raise ConfigError(
                f"{what} is no teacher: it gives {', '.join(outputs)}",
                "serve the reference with `guerdon serve-teacher`, and give its address and name",
            )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises ConfigError if the reference has another tokenizer than the policy, whose token ids it gets."""
        other = tokenizer_of(self._client, "reference")
        if other and (why := difference(identity(tokenizer), other)) is not None:
            raise ConfigError(
                f"the reference's tokenizer differs from the policy's ({why}), whose token ids are sent to it",
                "serve a reference with the policy's tokenizer, or leave reference.url out",
            )

    def remember_in(self, memory: dict[str, Any]) -> None:
        """Keeps the versions of the reference's weights in a run's memory, so that a resume knows them."""
        self._weights.remember_in(memory, "reference_weights")

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt; returns at once."""
        answers = self._client.submit(
            tokens=[rollout.tokens for rollout in group],
            prompt_lengths=[rollout.prompt_length for rollout in group],
            temperature=self._temperature,
            timeout_s=self._config.timeout_s,
        )
        self._pending.add(group, answers)

    def collect(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted, and sets each rollout's `ref_logprobs`, or its `error` and no reward.

        Calls `check` regularly while waiting; its exceptions end the wait.
        """
        for group, answers in self._pending.results(check):
            if isinstance(answers, GuerdonError):
                set_error(group, answers)
                continue
            self._weights.see(answers.weights_version)
            assert answers.logprobs is not None
            for rollout, logprobs, error in zip(group, answers.logprobs, answers.errors, strict=True):
                rollout.ref_logprobs = logprobs
                if error is not None:
                    rollout.reward, rollout.error = None, error

    def close(self) -> None:
        """Closes the connections, and abandons requests in progress."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
