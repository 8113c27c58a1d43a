"""Log-probs from a teacher's server, requested group by group while other responses are still generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np

from guerdon.actor.remote_rewards import (
    START_S,
    PendingGroups,
    WeightsLog,
    raise_config_error,
    raise_start_error,
    tokenizer_of,
)
from guerdon.actor.rollouts import Rollout
from guerdon.client import RetryPolicy, TeacherAnswers, TeacherClient
from guerdon.errors import ConfigError
from guerdon.settings.actors import TeacherServer
from guerdon.vocabulary import difference, identity


class RemoteTeacher:
    """A teacher on a server: `submit` a group as soon as it is generated, `collect` at the end.

    `role` is what it is to the run, and the section of its settings. Errors and a server that is away are handled as by
    RemoteRewards: a response without the teacher's log-probs counts as one without a reward.
    """

    def __init__(self, config: TeacherServer, temperature: float, role: Literal["reference", "teacher"]) -> None:
        """Asks for log-probs at this temperature; raises ConfigError for a malformed address."""
        self._config, self._temperature, self._role = config, temperature, role
        with raise_config_error(f"{role}.url"):
            self._client = TeacherClient(str(config.url), config.name, policy=RetryPolicy.patient(config.timeout_s))
        self._pending: PendingGroups[TeacherAnswers] = PendingGroups()
        self._weights = WeightsLog(role, "the KL before and after is not comparable")

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the server; raises StartError if it does not come in time, ConfigError if it is no teacher."""
        what, role = f"{self._role} '{self._config.name}' at {self._config.url}", self._role
        with raise_start_error(what, f"start it with `guerdon serve-teacher`, or correct {role}.url and name"):
            self._client.wait_ready(min(START_S, self._config.timeout_s, limit_s))
            outputs = self._client.info().outputs
        if "logprobs" not in outputs:
            raise ConfigError(
                f"{what} gives no log-probs, only {', '.join(outputs)}",
                f"serve the {role} with `guerdon serve-teacher`, and give its address and name",
            )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises ConfigError if the teacher has another tokenizer than the policy, whose token ids it gets."""
        other = tokenizer_of(self._client, self._role)
        if other and (why := difference(identity(tokenizer), other)) is not None:
            instead = ", or leave reference.url out" if self._role == "reference" else ""
            raise ConfigError(
                f"the {self._role}'s tokenizer differs from the policy's ({why}), whose token ids are sent to it",
                f"serve a {self._role} with the policy's tokenizer{instead}",
            )

    def remember_in(self, memory: dict[str, Any]) -> None:
        """Keeps the versions of the teacher's weights in a run's memory, so that a resume knows them."""
        self._weights.remember_in(memory, f"{self._role}_weights")

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
            self._weights.see(answers.weights_version)
            assert answers.logprobs is not None
            for rollout, logprobs, error in zip(group, answers.logprobs, answers.errors, strict=True):
                rollout.ref_logprobs = logprobs
                if error is not None:
                    rollout.reward, rollout.error = None, error

    def logprobs(self, rows: list[np.ndarray], prompt_lengths: np.ndarray) -> list[np.ndarray]:
        """Returns the log-probs of the rows' responses; blocks. Raises SampleFailed for the first that has none."""
        answers = self._client.logprobs(
            tokens=rows,
            prompt_lengths=prompt_lengths,
            temperature=self._temperature,
            timeout_s=self._config.timeout_s,
        )
        assert answers.logprobs is not None
        self._weights.see(answers.weights_version)
        answers.raise_for_failed()
        return answers.logprobs

    def close(self) -> None:
        """Closes the connections, and abandons requests in progress."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
