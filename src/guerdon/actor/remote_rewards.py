"""Rewards from a reward model's server, asked for group by group while other responses are still generated."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Generic, Self, TypeVar

from guerdon.actor.preemption import heeding
from guerdon.actor.rollouts import Ending, Rollout
from guerdon.client import CriticClient, RetryPolicy, RewardClient, Scores
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest, StartError
from guerdon.messages import answered, ended
from guerdon.settings.actors import RemoteRewardConfig
from guerdon.vocabulary import difference, has_other_template, identity, reported

T = TypeVar("T")

log = logging.getLogger(__name__)

START_S = 600.0
"""How long a server may take to load its model after the actor has started."""


class RemoteRewards:
    """A reward model on a server: `submit` a group as soon as it is generated, `collect` at the end.

    A server that is away or restarts is tried again for as long as `config.timeout_s` allows; a sample that got no
    reward then, or none that is finite, has an `error` and no reward. Where the server's weights become others
    than those that gave rewards before, it is told on the log.
    """

    def __init__(self, config: RemoteRewardConfig) -> None:
        """Raises ConfigError for a malformed address."""
        self._config = config
        self._urls = config.reward_model.addresses
        with addressed("reward_model.urls, ip or port"):
            self._client = RewardClient(
                self._urls, config.reward_model.name, policy=RetryPolicy.patient(config.timeout_s)
            )
        self._pending: Pending[Scores] = Pending()
        self._weights_seen: list[str] = []

    def wait_ready(self, limit_s: float = math.inf) -> None:
        """Waits for the server, at most so long; raises StartError where it does not come, or takes other input."""
        what = f"reward model '{self._config.reward_model.name}' at {', '.join(self._urls)}"
        with explained(what, "start it with `guerdon serve`, or correct its ip, port, urls and name in the settings"):
            self._client.wait_ready(min(START_S, self._config.timeout_s, limit_s))
            inputs = self._client.info().inputs
        wanted = {"tokens": "tokens", "text": "sentences", "messages": "messages"}[self._config.send]
        if wanted not in inputs:
            raise ConfigError(
                f"{what} takes no '{wanted}', but {', '.join(inputs)}", "change `send`, which says what it gets"
            )

    def remember_in(self, memory: dict[str, Any]) -> None:
        """From now on keeps in a run's memory which weights have given rewards, so that a resume knows them."""
        self._weights_seen = memory.setdefault("reward_weights", self._weights_seen)

    def check_tokenizer(self, tokenizer: Any, ending: Ending | None) -> None:
        """Raises ConfigError if token ids are sent, and mean other tokens to the reward model than to this tokenizer.

        With an `ending`, found by the policy's chat template, also says if the reward model has another template.
        """
        if self._config.send != "tokens":
            return
        own, other = identity(tokenizer), tokenizer_of(self._client, "reward model")
        if not other:
            return
        if (why := difference(own, other)) is not None:
            raise ConfigError(
                f"the reward model's tokenizer differs from the policy's ({why}), and `send` is tokens",
                "set `send` to text or messages, or take a reward model with the policy's tokenizer",
            )
        if ending is not None and has_other_template(own, other):
            log.warning(
                "the policy's chat template, which makes the token ids, differs from the reward model's; with "
                "`send: messages` the reward model applies its own"
            )

    def submit(self, group: list[Rollout]) -> None:
        """Sends the responses to one prompt, and returns at once."""
        if group := fitting(group, self._config.pad_to_length):
            samples = samples_of(group, self._config)
            self._pending.add(group, self._client.submit(**samples, timeout_s=self._config.timeout_s))

    def collect(self, heed: Callable[[], None] = lambda: None) -> None:
        """Waits for all that was submitted, and sets each rollout's `reward`, or its `error`.

        Meanwhile `heed` is called now and then; what it raises ends the waiting and is raised.
        """
        for group, scores in self._pending.answers(heed):
            if isinstance(scores, GuerdonError):
                fail(group, scores)
                continue
            self._note(scores.weights_version)
            for rollout, reward, error in zip(group, scores, scores.errors, strict=True):
                rollout.reward, rollout.error = (reward, None) if error is None else (None, error)

    def score(self, rollouts: list[Rollout], heed: Callable[[], None] = lambda: None) -> None:
        """Submits rollouts of several groups, and collects them."""
        for group in groups_of(rollouts):
            self.submit(group)
        self.collect(heed)

    def close(self) -> None:
        """Closes the connections; what is under way is given up."""
        self._client.close()

    def _note(self, version: str) -> None:
        if not version or version in self._weights_seen:
            return
        if self._weights_seen:
            log.warning(
                "the reward model's weights are now %s, and were %s: rewards before and after are not comparable",
                version,
                self._weights_seen[-1],
            )
        else:
            log.info("rewards are those of the weights %s", version)
        self._weights_seen.append(version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending(Generic[T]):
    """Groups on their way to a server, in the order in which they were sent."""

    def __init__(self) -> None:
        self._groups: list[tuple[list[Rollout], Future[T]]] = []

    def add(self, group: list[Rollout], future: Future[T]) -> None:
        self._groups.append((group, future))

    def answers(self, heed: Callable[[], None]) -> Iterator[tuple[list[Rollout], T | GuerdonError]]:
        """Each group with its answer, or the error that it got in place of one; none is left afterwards."""
        groups, self._groups = self._groups, []
        for group, future in groups:
            try:
                answer: T | GuerdonError = heeding(future, heed)
            except GuerdonError as e:
                answer = e
            yield group, answer


def tokenizer_of(client: RewardClient | CriticClient, what: str) -> str:
    """Returns the identity of the served model's tokenizer; empty, and a line on the log, if none is reported."""
    try:
        found = reported(client.config())
    except GuerdonError:
        found = ""
    if not found:
        log.info("the %s's server does not report its tokenizer; make sure that token ids mean the same there", what)
    return found


@contextmanager
def explained(what: str, help: str) -> Iterator[None]:  # noqa: A002 - as in errors
    """Turns what a server answers at the start into a StartError with a remedy."""
    try:
        yield
    except GuerdonError as e:
        raise StartError(f"{what} is not ready: {e}", help) from e


@contextmanager
def addressed(settings: str) -> Iterator[None]:
    """Turns a client's refusal of its address into a ConfigError."""
    try:
        yield
    except InvalidRequest as e:
        raise ConfigError(str(e), f"correct {settings} in the settings") from e


def samples_of(group: list[Rollout], config: RemoteRewardConfig) -> dict[str, Any]:
    """A group as arguments of a client's `submit`; ConfigError where messages are to be sent and there are none."""
    if config.send == "tokens":
        return token_samples_of(group, config.pad_to_length)
    hints: dict[str, Any] = {"groups": [rollout.group for rollout in group]}
    if config.send == "text":
        return hints | {"texts": [_text_of(rollout, config.suffix) for rollout in group]}
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
    has_stop_text = rollout.is_end and not rollout.has_eos  # it may be how the ending begins
    answer = ended(rollout.text, ending.text) if has_stop_text else rollout.text + ending.text
    return prompt.text + ending.lead + answer


def token_samples_of(group: list[Rollout], pad_to_length: int | None) -> dict[str, Any]:
    """The same, of the policy's own tokens, ended as the chat template ends an answer."""
    return {
        "tokens": [rollout.completed for rollout in group],
        "groups": [rollout.group for rollout in group],
        "prompt_lengths": [rollout.prompt_length for rollout in group],
        "pad_to_length": pad_to_length,
    }


def groups_of(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Neighbouring rollouts of the same prompt together."""
    return [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.group)]


def fitting(group: list[Rollout], pad_to_length: int | None) -> list[Rollout]:
    """The rollouts that can be sent; those longer than `pad_to_length` have failed."""
    too_long = [r for r in group if pad_to_length is not None and len(r.completed) > pad_to_length]
    fail(too_long, InvalidRequest(f"longer than pad_to_length, {pad_to_length}"))
    return [rollout for rollout in group if rollout not in too_long]


def fail(group: list[Rollout], error: GuerdonError) -> None:
    """Notes that none of these got an answer but this error."""
    for rollout in group:
        rollout.reward, rollout.error = None, str(error)
