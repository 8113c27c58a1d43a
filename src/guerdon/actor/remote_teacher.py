"""Log-probs from a teacher's server, requested group by group while other responses are still generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from guerdon.actor.remote_rewards import RemoteModel, raise_config_error
from guerdon.actor.rollouts import Rollout
from guerdon.client import RetryPolicy, TeacherAnswers, TeacherClient
from guerdon.errors import ConfigError
from guerdon.settings.actors import TeacherServer


class RemoteTeacher(RemoteModel[TeacherClient, TeacherAnswers]):
    """A teacher on a server.

    `role` is its role in the run, and the section of its settings. A response without the teacher's log-probs counts as
    one without a reward.
    """

    def __init__(self, config: TeacherServer, temperature: float, role: Literal["reference", "teacher"]) -> None:
        """Asks for log-probs at this temperature; raises ConfigError for a malformed address."""
        self._config, self._temperature = config, temperature
        with raise_config_error(f"{role}.url"):
            client = TeacherClient(str(config.url), config.name, policy=RetryPolicy.patient(config.timeout_s))
        super().__init__(client, role, config.timeout_s, "the KL before and after is not comparable")

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the server; raises StartError if it does not come in time, ConfigError if it is no teacher."""
        what, role = f"{self._role} '{self._config.name}' at {self._config.url}", self._role
        remedy = f"start it with `guerdon serve-teacher`, or correct {role}.url and name"
        outputs = self._await_server(what, remedy, limit_s).outputs
        if "chunks" in outputs:
            raise ConfigError(
                f"{what} reads ids of another tokenizer, and gives some of the policy's tokens no log-prob",
                f"serve a {role} with the policy's tokenizer, without student_tokenizer",
            )
        if "logprobs" not in outputs:
            raise ConfigError(
                f"{what} gives no log-probs, only {', '.join(outputs)}",
                f"serve the {role} with `guerdon serve-teacher`, and give its address and name",
            )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises ConfigError if the teacher has another tokenizer than the policy, whose token ids it gets."""
        instead = ", or leave reference.url out" if self._role == "reference" else ""
        remedy = f"serve a {self._role} with the policy's tokenizer{instead}"
        self._refuse_other_tokenizer(tokenizer, "whose token ids are sent to it", remedy)

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt; returns at once."""
        answers = self._client.submit(
            tokens=[rollout.tokens for rollout in group],
            prompt_lengths=[rollout.prompt_length for rollout in group],
            temperature=self._temperature,
            timeout_s=self._timeout_s,
        )
        self._pending.append((group, answers))

    def collect(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted, and sets each rollout's `ref_logprobs`, or its `error` and no reward."""
        for group, answers in self._results(check):
            self._weights.see(answers.weights_version)
            assert answers.logprobs is not None
            for rollout, logprobs, error in zip(group, answers.logprobs, answers.errors, strict=True):
                rollout.ref_logprobs = logprobs
                if error is not None:
                    rollout.reward, rollout.error = None, error

    def logprobs(self, rows: list[np.ndarray], prompt_lengths: np.ndarray) -> list[np.ndarray]:
        """Returns the log-probs of the rows' responses; blocks. Raises SampleFailed for the first that has none."""
        answers = self._client.logprobs(
            tokens=rows, prompt_lengths=prompt_lengths, temperature=self._temperature, timeout_s=self._timeout_s
        )
        assert answers.logprobs is not None
        self._weights.see(answers.weights_version)
        answers.raise_for_failed()
        return answers.logprobs
