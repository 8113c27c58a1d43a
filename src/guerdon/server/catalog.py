"""A server's models by name, loaded or not, sums of them, and a critic's operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from guerdon.core import SHARING, ModelInfo
from guerdon.critic_core import OperationInfo
from guerdon.errors import InvalidRequest, Unavailable, UnknownModel
from guerdon.kinds import all_kinds
from guerdon.kinds.kind import Served, Tokenizer
from guerdon.kinds.sum import Sum
from guerdon.server.batching.jobs import Limits
from guerdon.settings.config import RewardConfig, ServedModelConfig
from guerdon.teacher_core import NEXT_TOKENS
from guerdon.wire import schema
from guerdon.wire.forms.tokens import TextTokenizer
from guerdon.wire.schema import Info


def file_time_ns() -> int:
    """Returns the time of day, by which the changes of files are dated."""
    return time.time_ns()


def batch_limits(model: ServedModelConfig, served: Served, num_parts: int) -> Limits:
    """Returns the limits of a model's batch and queue; each of `num_parts` computes a part of a batch."""
    return Limits(
        max_batch_tokens=served.max_batch_tokens * (1 if served.takes_all else num_parts),
        max_queue_tokens=model.max_queue_tokens,
        max_queue_sequences=model.max_queue_sequences,
        shares=served.info.path in SHARING,
    )


RETRY_AFTER_S = 5.0
"""When to ask a sleeping model again: trainers sleep models for a step."""


@dataclass(slots=True, eq=False)
class Sleep:
    """A model's sleep, of vLLM's `level`: until it is `over`, `requests_wait` or are refused."""

    level: int
    requests_wait: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Entry:
    """One model's name: its settings, and the model that serves under it; `served` is None while unloaded.

    `sleep` is set from when a sleep is decided until the model is awake. `since_ns` is when its files
    began to be read.
    """

    def __init__(self, config: ServedModelConfig, served: Served, since_ns: int) -> None:
        self.config = config
        self.served: Served | None = served
        self.since_ns = since_ns
        self.sleep: Sleep | None = None
        self._last = served.info

    @property
    def info(self) -> ModelInfo:
        """The model that serves now, or that served last."""
        return self._last if self.served is None else self.served.info

    def put(self, config: ServedModelConfig, served: Served | None, since_ns: int) -> None:
        """Puts another model in place, or none."""
        self._last = self.info if served is None else served.info
        self.config, self.served, self.since_ns = config, served, since_ns

    def loaded(self) -> Served:
        """Returns the model that serves; raises Unavailable if there is none."""
        if self.served is None:
            raise self.asleep() if self.sleep else Unavailable(f"{self.info.name} is unloaded; an admin may load it")
        return self.served

    def check_serves(self) -> None:
        """Raises Unavailable unless requests are answered, or wait until they are."""
        if self.sleep is None:
            self.loaded()
        elif not self.sleep.requests_wait:
            raise self.asleep()

    async def awake(self) -> None:
        """Waits until the model is awake; raises Unavailable if requests do not wait. Suspends only while it sleeps."""
        while self.sleep is not None:
            self.check_serves()
            await self.sleep.over.wait()

    def wake(self) -> None:
        """Ends the sleep, if there is one."""
        if self.sleep is not None:
            self.sleep.over.set()
            self.sleep = None

    def asleep(self) -> Unavailable:
        """Returns the error for requests that do not wait."""
        error = Unavailable(f"{self.info.name} is asleep until POST /wake_up")
        error.retry_after_s = RETRY_AFTER_S
        return error


class Catalog:
    """Every name that a request can use; names stay while the server runs. Belongs to one asyncio loop."""

    def __init__(
        self,
        models: ListLike[tuple[ServedModelConfig, Served]],
        rewards: Iterable[RewardConfig],
        operations: Iterable[OperationInfo],
        critic_name: str = "",
        *,
        since_ns: int | None = None,
    ) -> None:
        """`critic_name` is the model whose scores are the critic's values, `since_ns` all entries', by default now."""
        self.critic_name = critic_name
        since_ns = file_time_ns() if since_ns is None else since_ns
        self.entries = {served.info.name: Entry(model, served, since_ns) for model, served in models}
        self.operations = {info.name: info for info in operations}
        self.sums = {
            reward.name: Sum(reward, [self.entries[part.model].info for part in reward.components])
            for reward in rewards
        }

    def entry(self, name: str) -> Entry:
        """Returns the entry of the model's name; raises UnknownModel."""
        if name not in self.entries:
            raise self._unknown(name)
        return self.entries[name]

    async def awake(self, name: str) -> ModelInfo:
        """Waits until the model is awake; returns its info. Raises UnknownModel and Unavailable."""
        entry = self.entry(name)
        await entry.awake()
        return entry.loaded().info

    def put(self, name: str, config: ServedModelConfig, served: Served | None, since_ns: int) -> None:
        """Puts another model, or none, under the name; its sums follow."""
        self.entries[name].put(config, served, since_ns)
        for made in self.sums_of(name):
            made.renew([self.entries[component].info for component in made.components])

    def sums_of(self, name: str) -> list[Sum]:
        """Returns the sums of which the model is a component."""
        return [made for made in self.sums.values() if name in made.components]

    def infos(self) -> list[ModelInfo]:
        """Returns all that gives scores: sums first."""
        return [*(made.info for made in self.sums.values()), *(entry.info for entry in self.entries.values())]

    def loaded(self) -> list[ModelInfo]:
        """Returns the loaded models of `infos`."""
        return [info for info in self.infos() if self.is_loaded(info.name)]

    def is_loaded(self, name: str) -> bool:
        """Whether the model or operation of that name is neither unloaded nor asleep."""
        entry = self.entries.get(name)
        return entry is None or (entry.served is not None and entry.sleep is None)

    def tokenizer(self, name: str) -> Tokenizer | None:
        """Returns the model's tokenizer; None if it has none, if it is unloaded, and for a sum."""
        entry = self.entries.get(name)
        encoder = None if entry is None or entry.served is None else entry.served.encoder
        return encoder if isinstance(encoder, Tokenizer) else None

    def tokenized_by(self, name: str) -> tuple[ModelInfo, TextTokenizer]:
        """Returns the model that a form names, without a name the first with a tokenizer, and its tokenizer.

        Raises UnknownModel, Unavailable if it is unloaded, InvalidRequest if it has no tokenizer.
        """
        infos = [self.scored_by(name)] if name else self.infos()
        for info in infos:
            entry = self.entries.get(info.name)
            served = None if entry is None or (entry.served is None and not name) else entry.loaded()
            encoder = None if served is None else all_kinds.of(info).tokenizer(served)
            if isinstance(encoder, TextTokenizer):
                return info, encoder
        what = f"{infos[0].name} has no tokenizer" if name else "no model here has a tokenizer"
        raise InvalidRequest(f"{what} that could be asked; served here: {', '.join(x.name for x in self.infos())}")

    def models(self) -> list[Info]:
        """Returns all that has a name: sums of rewards, models, and the critic's operations."""
        return [*self.infos(), *self.operations.values()]

    def model(self, name: str, version: str = "") -> Info:
        """Returns the model or operation of that name; raises UnknownModel, which lists those that are served."""
        if version in ("", "1"):
            if name in self.sums:
                return self.sums[name].info
            if name in self.entries:
                return self.entries[name].info
            if name in self.operations:
                return self.operations[name]
        raise self._unknown(name, version)

    def names(self) -> list[str]:
        """Returns all names."""
        return [info.name for info in self.models()]

    def scored_by(self, name: str, output: str = schema.REWARDS.name) -> ModelInfo:
        """Returns the model that a form names: by its name, else by its checkpoint's folder or hub id.

        Without a name it is the first that gives `output`, or an attribute of that name, if any: sums before models,
        each in the order of the settings. Raises UnknownModel, also if several models were loaded from that checkpoint.
        """
        infos = self.infos()
        if not name:
            asks_next = output == NEXT_TOKENS
            named = (i for i in infos if output in (*i.outputs, *i.attribute_names) or (asks_next and i.max_top_k > 0))
            return next(named, infos[0])
        found = [info for info in infos if info.name == name] or [info for info in infos if info.source == name]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(info.name for info in found)
            raise UnknownModel(f"several models were loaded from {name!r}; ask for one by its name: {names}")
        raise UnknownModel(f"unknown model {name!r}; served here: {', '.join(info.name for info in infos)}")

    def _unknown(self, name: str, version: str = "") -> UnknownModel:
        asked = f"{name!r} version {version}" if version else repr(name)
        names = ", ".join(sorted(self.names()))
        return UnknownModel(f"unknown model {asked}; served here: {names} (version 1)")
