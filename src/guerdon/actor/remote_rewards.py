"""Rewards from a reward model's server, requested group by group while other responses are still generated."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any, Generic, Self, TypeVar

from guerdon.actor.preemption import wait_for
from guerdon.actor.rollouts import Rollout
from guerdon.client import CriticClient, ModelSignature, RetryPolicy, RewardClient, Scores, TeacherClient
from guerdon.endings import Ending, ended
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest, StartError
from guerdon.messages import answered
from guerdon.settings.actors import RemoteRewardConfig
from guerdon.vocabulary import difference, has_other_template, identity, reported

T = TypeVar("T")
C = TypeVar("C", RewardClient, CriticClient, TeacherClient)

log = logging.getLogger(__name__)

START_S = 600.0
"""Seconds that a server may take to load its model after the actor has started."""


class RemoteModel(Generic[C, T]):
    """A model on a server as an actor asks it: used as a context, which closes the connections.

    `submit` a group as soon as it is generated, `collect` at the end. Requests to a server that is away or restarting
    are retried for `timeout_s`. `role` is what the model is to the run; `consequence` is logged if its weights change.
    """

    def __init__(self, client: C, role: str, timeout_s: float, consequence: str = "") -> None:
        self._client: C = client
        self._role, self._timeout_s = role, timeout_s
        self._weights = WeightsLog(role, consequence)
        self._pending: list[tuple[list[Rollout], Future[T]]] = []

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt; returns at once."""
        raise NotImplementedError

    def collect(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted, and sets what the model gives of each rollout, or its `error`.

        Calls `check` regularly while waiting; its exceptions end the wait.
        """
        raise NotImplementedError

    def score(self, rollouts: list[Rollout], check: Callable[[], None] = lambda: None) -> None:
        """Submits rollouts of several groups, and collects them."""
        for group in groups_of(rollouts):
            self.submit(group)
        self.collect(check)

    def remember_in(self, memory: dict[str, Any]) -> None:
        """Keeps the versions of the model's weights in a run's memory, so that a resume knows them."""
        self._weights.remember_in(memory, f"{self._role.split()[0]}_weights")

    def close(self) -> None:
        """Closes the connections, and abandons requests in progress."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _results(self, check: Callable[[], None]) -> Iterator[tuple[list[Rollout], T]]:
        """Yields each answered group with its result; the others get their error. None is pending afterwards."""
        pending, self._pending = self._pending, []
        for group, future in pending:
            try:
                result = wait_for(future, check)
            except GuerdonError as e:
                set_error(group, e)
            else:
                yield group, result

    def _await_server(self, what: str, remedy: str, limit_s: float) -> ModelSignature:
        """Returns what the model takes and gives; raises StartError with the remedy if it does not come in time."""
        try:
            self._client.wait_ready(min(START_S, self._timeout_s, limit_s))
            return self._client.info()
        except GuerdonError as e:
            raise StartError(f"{what} is not ready: {e}", remedy) from e

    def _refuse_other_tokenizer(self, tokenizer: Any, consequence: str, remedy: str) -> tuple[str, str]:
        """Returns the identities of this tokenizer and the model's; both empty, and logged, if the server reports none.

        Raises ConfigError if they differ.
        """
        try:
            other = reported(self._client.config())
        except GuerdonError:
            other = ""
        own = identity(tokenizer) if other else ""
        if not other:
            role = self._role
            log.info("the %s's server does not report its tokenizer; make sure that it has the policy's", role)
        elif (why := difference(own, other)) is not None:
            raise ConfigError(f"the {self._role}'s tokenizer differs from the policy's ({why}), {consequence}", remedy)
        return own, other


class RemoteRewards(RemoteModel[RewardClient, Scores]):
    """A reward model on a server. A sample without a finite reward has an `error` and no reward."""

    def __init__(self, config: RemoteRewardConfig) -> None:
        """Raises ConfigError for a malformed address."""
        self._config = config
        self._urls = config.reward_model.addresses
        policy = RetryPolicy.patient(config.timeout_s)
        with raise_config_error("reward_model.urls, ip or port"):
            client = RewardClient(self._urls, config.reward_model.name, policy=policy)
        consequence = "rewards before and after are not comparable"
        super().__init__(client, "reward model", config.timeout_s, consequence)

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the server; raises StartError if it does not come in time, or has another form of input."""
        what = f"reward model '{self._config.reward_model.name}' at {', '.join(self._urls)}"
        remedy = "start it with `guerdon serve`, or correct its ip, port, urls and name"
        inputs = self._await_server(what, remedy, limit_s).inputs
        wanted = {"tokens": "tokens", "text": "sentences", "messages": "messages"}[self._config.send]
        if wanted not in inputs:
            raise ConfigError(
                f"{what} accepts {', '.join(inputs)}, but not '{wanted}'",
                "change `send`, the form in which answers are sent",
            )

    def check_tokenizer(self, tokenizer: Any, ending: Ending | None) -> None:
        """Raises ConfigError if token ids are sent, and the reward model has another tokenizer than this one.

        With an `ending`, found by the policy's chat template, warns if the reward model has another template; so it
        does if texts are sent with another ending than the reward model's template writes.
        """
        if self._config.send == "text":
            sent = self._config.suffix or ("" if ending is None else ending.text)
            with suppress(GuerdonError):  # not every server has configurations
                theirs = Ending.reported(self._client.config())
                if theirs is not None and theirs.text != sent:
                    log.warning(
                        "the reward model's chat template ends an answer with %r, and texts are sent with %r: set "
                        "`send` to messages, unless it was trained on such texts",
                        theirs.text,
                        sent,
                    )
        if self._config.send != "tokens":
            return
        remedy = "set `send` to text or messages, or take a reward model with the policy's tokenizer"
        own, other = self._refuse_other_tokenizer(tokenizer, "and `send` is tokens", remedy)
        if other and ending is not None and has_other_template(own, other):
            log.warning(
                "the policy's chat template, which makes the token ids, differs from the reward model's; with "
                "`send: messages` the reward model applies its own"
            )

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt; returns at once."""
        if group := drop_too_long(group, self._config.pad_to_length):
            samples = samples_of(group, self._config)
            self._pending.append((group, self._client.submit(**samples, timeout_s=self._timeout_s)))

    def collect(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted, and sets each rollout's `reward` or `error`; `check` as in RemoteModel."""
        for group, scores in self._results(check):
            self._weights.see(scores.weights_version)
            for rollout, reward, error in zip(group, scores, scores.errors, strict=True):
                rollout.reward, rollout.error = (reward, None) if error is None else (None, error)


class WeightsLog:
    """Logs the weights that a server answers with, and warns when they change."""

    def __init__(self, what: str, consequence: str) -> None:
        self._what, self._consequence = what, consequence
        self._seen: list[str] = []

    def remember_in(self, memory: dict[str, Any], key: str) -> None:
        """Keeps the versions under `key` in a run's memory, so that a resume knows them."""
        self._seen = memory.setdefault(key, self._seen)

    def see(self, version: str) -> None:
        """Logs the version if it is new."""
        if not version or version in self._seen:
            return
        if self._seen:
            log.warning(
                "the %s's weights changed to %s from %s: %s", self._what, version, self._seen[-1], self._consequence
            )
        else:
            log.info("the %s's weights are %s", self._what, version)
        self._seen.append(version)


@contextmanager
def raise_config_error(settings: str) -> Iterator[None]:
    """Turns a client's error about its address into a ConfigError."""
    try:
        yield
    except InvalidRequest as e:
        raise ConfigError(str(e), f"correct {settings} in the settings") from e


def samples_of(group: list[Rollout], config: RemoteRewardConfig) -> dict[str, Any]:
    """Returns a group as arguments of a client's `submit`; raises ConfigError if messages are missing."""
    if config.send == "tokens":
        return token_samples_of(group, config.pad_to_length)
    hints: dict[str, Any] = {"groups": [rollout.group for rollout in group]}
    if config.send == "text":
        texts, prompts = [_text_of(rollout, config.suffix) for rollout in group], [r.prompt.text for r in group]
        return hints | {"texts": texts, "prompts": prompts}
    conversations = []
    for rollout in group:
        if rollout.prompt.messages is None:
            raise ConfigError(
                "`send` is messages, but the prompts are plain text", "send text or tokens, or set data.template"
            )
        conversations.append(answered(rollout.prompt.messages, rollout.text))
    return hints | {"messages": conversations}


def _text_of(rollout: Rollout, suffix: str) -> str:
    """Returns prompt and response as one text, ended by the suffix or else as the chat template ends an answer."""
    prompt, ending = rollout.prompt, rollout.prompt.ending
    if suffix or ending is None:
        return prompt.text + rollout.text + (suffix if rollout.has_eos else "")
    has_stop_text = rollout.is_end and not rollout.has_eos  # it may be the start of the ending
    answer = ended(rollout.text, ending.text) if has_stop_text else rollout.text + ending.text
    return prompt.text + ending.lead + answer


def token_samples_of(group: list[Rollout], pad_to_length: int | None) -> dict[str, Any]:
    """As `samples_of`, with the policy's token ids, ended as the chat template ends an answer."""
    return {
        "tokens": [rollout.completed for rollout in group],
        "groups": [rollout.group for rollout in group],
        "prompt_lengths": [rollout.prompt_length for rollout in group],
        "pad_to_length": pad_to_length,
    }


def groups_of(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Splits rollouts into runs of the same prompt."""
    return [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.group)]


def drop_too_long(group: list[Rollout], pad_to_length: int | None) -> list[Rollout]:
    """Returns the rollouts that can be sent; longer ones than `pad_to_length` get an error."""
    too_long = [r for r in group if pad_to_length is not None and len(r.completed) > pad_to_length]
    set_error(too_long, InvalidRequest(f"longer than pad_to_length, {pad_to_length}"))
    return [rollout for rollout in group if rollout not in too_long]


def set_error(group: list[Rollout], error: GuerdonError) -> None:
    """Gives all of these this error, and no reward."""
    for rollout in group:
        rollout.reward, rollout.error = None, str(error)
