"""A reward that is the weighted sum of several: asks its components, and combines their replies."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest, Overloaded, SampleFailed, named
from guerdon.kinds.kind import Kind
from guerdon.settings.config import ComponentConfig, RewardConfig
from guerdon.vocabulary import difference


class SumKind(Kind):
    """A sum of other models' rewards; nothing is loaded for it."""

    names = ("sum",)
    settings = RewardConfig

    def describe(self, info: ModelInfo) -> str:
        """Returns the console's line about the sum, without its name."""
        return f"{info.kind} of {info.why}, weights {info.weights_version}"

    def tile(self, info: ModelInfo, infos: Iterable[ModelInfo]) -> dict[str, Any]:
        """Returns the components, and whether none of them reads tokens."""
        parts = [one for one in infos if one.name in info.attribute_names]
        components = list(info.attribute_names)
        return {"components": components, "estimates_tokens": not any(one.takes_tokens for one in parts)}

    def why_fixed(self, info: ModelInfo, what: str) -> str:
        """Says that its components are loaded."""
        return f"{info.name} is a sum, and cannot be {what}; load its components: {info.why}"


class Running:
    """Mean and standard deviation (of the population, not an estimate) of all numbers added.

    Kept as deviations from the first number, so that a large common offset costs no digits; equal numbers have exactly
    0 deviation.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first = 0.0
        self._offset = 0.0
        self._squares = 0.0

    @property
    def mean(self) -> float:
        """0 until a number was added."""
        return self._first + self._offset

    @property
    def std(self) -> float:
        """0 until two different numbers were added."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def add(self, values: np.ndarray) -> None:
        """Adds finite numbers, float64 `[N]`; N may be 0."""
        if not len(values):
            return
        if not self.count:
            self._first = float(values[0])
        offsets = values - self._first
        # Not from their mean: of equal numbers it may differ in its last digit.
        middle = float(offsets[0] + np.mean(offsets - offsets[0]))
        squares = float(np.sum((offsets - middle) ** 2))
        before, self.count = self.count, self.count + len(values)
        step, share = middle - self._offset, len(values) / self.count
        self._offset += step * share
        self._squares += squares + step**2 * before * share


class Sum:
    """One reward made of several models' and functions' rewards, with running statistics of them.

    A sample's reward is `clip(sum over components of weight * clip(normalise(its reward)))`; its attributes are the
    components' own rewards, as their models gave them.
    """

    def __init__(self, config: RewardConfig, infos: ListLike[ModelInfo]) -> None:
        """`infos` are the components, in the config's order; raises ConfigError if no sample suits them all."""
        self._config = config
        self._seen: list[dict[str, Running]] = [{} for _ in infos]
        self.renew(infos)
        if not (self.info.takes_text or self.info.takes_tokens):
            raise ConfigError(
                f"no sample can be scored by all components of {config.name}: {_readings(infos)}",
                "give the checkpoints their tokenizers, and the functions a first parameter `texts` or `responses`",
            )

    def renew(self, infos: ListLike[ModelInfo]) -> None:
        """Updates the components after a hot swap; new weights start new statistics.

        The previous weights' statistics are kept for replies in progress.
        """
        self.info = _info(self._config, infos)
        self._infos = infos
        for seen, info in zip(self._seen, infos, strict=True):
            if info.weights_version not in seen:
                last = [*seen.items()][-1:]
                seen.clear()
                seen.update([*last, (info.weights_version, Running())])

    @property
    def components(self) -> tuple[str, ...]:
        """The models' names."""
        return self.info.attribute_names

    def check(self, request: ScoreRequest) -> None:
        """Raises InvalidRequest if not every component reads samples of this form."""
        info = self.info
        if request.messages is not None and not info.takes_messages:
            without = ", ".join(part.name for part in self._infos if not part.takes_messages)
            raise InvalidRequest(
                f"{info.name} takes no messages: {without} cannot read them (a checkpoint needs a chat template, a "
                "function a first parameter `responses`); send sentences, formatted for all its components"
            )
        if request.texts is not None and not info.takes_text:
            raise InvalidRequest(f"{info.name} takes no text: {_readings(self._infos)}; send tokens")
        if request.tokens is not None and not info.takes_tokens:
            raise InvalidRequest(f"{info.name} takes no token ids: {_readings(self._infos)}; send sentences")

    async def ask(self, request: ScoreRequest, score: Callable[[str], Coroutine[Any, Any, ScoreReply]]) -> ScoreReply:
        """Returns the sum's reply; if a component refuses, the others drop the request, and its error is raised."""
        self.check(request)

        async def ask(component: str) -> ScoreReply:
            try:
                return await score(component)
            except Overloaded as e:
                raise named(component, e) from e

        return self.combine(await ask_together([ask(component) for component in self.components]))

    def combine(self, replies: ListLike[ScoreReply]) -> ScoreReply:
        """Returns the sum's reply, and updates the components' statistics; the replies are in the config's order.

        A sample fails if one of its components failed, with that error and the component's name; such samples do not
        count in the statistics.
        """
        rewards = np.array(
            [[r.reward if isinstance(r, Score) else np.nan for r in reply.results] for reply in replies], np.float64
        )
        fine = np.isfinite(rewards).all(axis=0)
        own = [seen.get(reply.weights_version, Running()) for seen, reply in zip(self._seen, replies, strict=True)]
        for running, row in zip(own, rewards, strict=True):
            running.add(row[fine])
        totals = np.zeros(rewards.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):  # the sample fails instead
            for part, row, seen in zip(self._config.components, rewards, own, strict=True):
                totals += part.weight * _clipped(_normalised(row, part, seen), part.clip)
            totals = _clipped(totals, self._config.clip).astype(np.float32)
        attributes = rewards.T.astype(np.float32)
        # No loop in Python over the rows: it would block the event loop.
        results: list[Score | GuerdonError] = list(map(Score, totals.tolist(), attributes))
        for i in np.flatnonzero(~(fine & np.isfinite(totals))):
            own_results = zip(self.components, (reply.results[i] for reply in replies), strict=True)
            failures = (named(name, result) for name, result in own_results if isinstance(result, GuerdonError))
            results[i] = next(failures, SampleFailed(f"the weighted sum of its rewards is {totals[i]}"))
        return ScoreReply(
            results,
            np.max([reply.lengths for reply in replies], axis=0).tolist(),
            _version(self._config, self.components, [reply.weights_version for reply in replies]),
            max(reply.queue_s for reply in replies),
            sum(reply.compute_s for reply in replies),
        )

    def statistics(self) -> Iterator[tuple[str, float, float]]:
        """Yields name, mean and standard deviation of each component's own rewards, once there are any."""
        for info, seen in zip(self._infos, self._seen, strict=True):
            if (running := seen[info.weights_version]).count:
                yield info.name, running.mean, running.std


async def ask_together(asks: ListLike[Coroutine[Any, Any, ScoreReply]]) -> list[ScoreReply]:
    """Returns all replies; if one raises, the others drop their requests, and its error is raised."""
    import asyncio  # here, because `--help` would wait for it

    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for one in asks:
                tasks.append(group.create_task(one))
                await asyncio.sleep(0)  # so that other requests have their turn between a large one's parts
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
    return [task.result() for task in tasks]


def _normalised(rewards: np.ndarray, config: ComponentConfig, seen: Running) -> np.ndarray:
    if config.normalize == "given":
        return (rewards - (config.mean or 0.0)) / (config.std or 1.0)
    if config.normalize == "running" and seen.std > 0:
        return (rewards - seen.mean) / seen.std
    return rewards


def _clipped(values: np.ndarray, clip: float | None) -> np.ndarray:
    return values if clip is None else np.clip(values, -clip, clip)


def _info(config: RewardConfig, infos: ListLike[ModelInfo]) -> ModelInfo:
    """Returns what holds for all components together."""
    readers = [info for info in infos if info.takes_tokens]
    # A function of tokens takes any ids, and has no EOS.
    vocab_sizes = {info.vocab_size for info in readers} - {None}
    eos_token_ids = {info.eos_token_id for info in readers} - {None}
    tokenizers = [info.tokenizer for info in readers if info.tokenizer]
    has_one_vocabulary = len(vocab_sizes) <= 1 and len(eos_token_ids) <= 1
    has_one_vocabulary &= not any(difference(tokenizers[0], other) for other in tokenizers[1:])
    names = tuple(info.name for info in infos)
    endings = {info.ending for info in infos if info.ending}
    # A reward is the components' own rewards times their weights.
    is_linear = config.clip is None and all(p.clip is None and p.normalize == "none" for p in config.components)
    return ModelInfo(
        config.name,
        "sum",
        outputs=("rewards", "attributes"),
        attribute_names=names,
        attribute_weights=tuple(part.weight for part in config.components) if is_linear else (),
        vocab_size=next(iter(vocab_sizes), None) if has_one_vocabulary else None,
        max_length=min((info.max_length for info in infos if info.max_length is not None), default=None),
        eos_token_id=next(iter(eos_token_ids), None) if has_one_vocabulary else None,
        takes_text=all(info.takes_text for info in infos),
        takes_messages=all(info.takes_messages for info in infos),
        takes_tokens=len(readers) == len(infos) and has_one_vocabulary,
        takes_prompts=any(info.takes_prompts for info in infos),
        takes_labels=any(info.takes_labels for info in infos),
        weights_version=_version(config, names, [info.weights_version for info in infos]),
        path="sum",
        is_checkpoint=False,
        has_components=True,
        compares=any(info.compares for info in infos),
        tokenizer=tokenizers[0] if tokenizers and has_one_vocabulary else "",
        ending=endings.pop() if len(endings) == 1 else "",
        why=" + ".join(f"{part.weight:g} {part.model}" for part in config.components),
    )


def _version(config: RewardConfig, names: ListLike[str], versions: ListLike[str]) -> str:
    """Returns the components' versions, and a digest of what the sum makes of their rewards if it is not plain."""
    rules = [(part.weight, part.normalize, part.mean, part.std, part.clip) for part in config.components]
    own = "" if {*rules} == {(1.0, "none", None, None, None)} and config.clip is None else repr((config.clip, rules))
    digest = f";sum={hashlib.blake2b(own.encode(), digest_size=4).hexdigest()}" if own else ""
    return ";".join(f"{name}={version}" for name, version in zip(names, versions, strict=True)) + digest


def _readings(infos: ListLike[ModelInfo]) -> str:
    """Describes each component's inputs."""
    return "; ".join(f"{info.name} reads {_reading(info)}" for info in infos)


def _reading(info: ModelInfo) -> str:
    if not info.takes_tokens:
        return "text"
    ids = "token ids" if info.vocab_size is None else f"ids of a vocabulary of {info.vocab_size}"
    ids += "" if info.eos_token_id is None else f" with EOS {info.eos_token_id}"
    ids += f" (digest {info.vocabulary})" if info.vocabulary else ""
    return f"text or {ids}" if info.takes_text else ids
