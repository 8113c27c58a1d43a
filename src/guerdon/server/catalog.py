"""What a server has by which name: models that are loaded or not, sums of them, and a critic's operations."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from collections.abc import Sequence as ListLike
from typing import Protocol, runtime_checkable

import numpy as np

from guerdon.core import Message, ModelInfo, OperationInfo, Truncation
from guerdon.errors import InvalidRequest, Unavailable, UnknownModel
from guerdon.server.sums import Sum
from guerdon.settings.config import ModelConfig, RewardConfig

Steps = Generator[None, None, ListLike[np.ndarray | InvalidRequest]]
"""Work in short steps, which returns rows of ids, or what is wrong with them."""


class Encoder(Protocol):
    """Turns text into ids, or says in a text's place what is wrong with it; thread-safe."""

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]: ...


@runtime_checkable
class Tokenizer(Encoder, Protocol):
    """An encoder that also reads messages, and knows the text of its ids; a user's `tokenize_func` is none."""

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray | InvalidRequest]: ...

    def encode_in_steps(
        self, texts: list[str], add_special_tokens: bool, truncation: Truncation | None, max_tokens: int | None
    ) -> Steps: ...

    def encode_messages_in_steps(
        self, conversations: list[list[Message]], truncation: Truncation | None, max_tokens: int | None
    ) -> Steps: ...

    def render_prompts(self, conversations: list[list[Message]]) -> list[str | InvalidRequest]: ...

    def pieces(self, tokens: np.ndarray) -> list[str]: ...


class Served(Protocol):
    """What the service asks of a model that its worker holds: what it is, and how text becomes its ids."""

    info: ModelInfo
    encoder: Encoder | None
    max_batch_tokens: int
    takes_all: bool


class Entry:
    """One model's name: its settings, and what serves under it; `served` is None while it is unloaded."""

    def __init__(self, config: ModelConfig, served: Served) -> None:
        self.config = config
        self.served: Served | None = served
        self._last = served.info

    @property
    def info(self) -> ModelInfo:
        """What serves now, or what did so last."""
        return self._last if self.served is None else self.served.info

    def put(self, config: ModelConfig, served: Served | None) -> None:
        """Has another model serve from now on, or none."""
        self._last = self.info if served is None else served.info
        self.config, self.served = config, served

    def loaded(self) -> Served:
        """What serves; raises Unavailable where nothing does."""
        if self.served is None:
            raise Unavailable(f"{self.info.name} is unloaded; an admin may load it")
        return self.served


class Catalog:
    """Every name that can be asked for; names stay for as long as the server runs. Belongs to one asyncio loop."""

    def __init__(
        self,
        models: ListLike[tuple[ModelConfig, Served]],
        rewards: Iterable[RewardConfig],
        operations: Iterable[OperationInfo],
        critic_name: str = "",
    ) -> None:
        """`critic_name` is the model whose scores are the critic's values."""
        self.critic_name = critic_name
        self.entries = {served.info.name: Entry(model, served) for model, served in models}
        self.operations = {info.name: info for info in operations}
        self.sums = {
            reward.name: Sum(reward, [self.entries[part.model].info for part in reward.components])
            for reward in rewards
        }

    def entry(self, name: str) -> Entry:
        """Returns what is known under the model's name; raises UnknownModel."""
        if name not in self.entries:
            raise self._unknown(name)
        return self.entries[name]

    def put(self, name: str, config: ModelConfig, served: Served | None) -> None:
        """Has another model serve under the name from now on, or none; sums tell of it, too."""
        self.entries[name].put(config, served)
        for made in self.sums_of(name):
            made.renew([self.entries[component].info for component in made.components])

    def sums_of(self, name: str) -> list[Sum]:
        """Those of which the model is a component."""
        return [made for made in self.sums.values() if name in made.components]

    def infos(self) -> list[ModelInfo]:
        """All that gives scores: sums first."""
        return [*(made.info for made in self.sums.values()), *(entry.info for entry in self.entries.values())]

    def loaded(self) -> list[ModelInfo]:
        """Those of them that can be asked now."""
        return [info for info in self.infos() if self.is_loaded(info.name)]

    def is_loaded(self, name: str) -> bool:
        """Whether nothing of that name is unloaded."""
        return name not in self.entries or self.entries[name].served is not None

    def tokenizer(self, name: str) -> Tokenizer | None:
        """What makes ids of a model's text and text of its ids; None where that is a user's function, where the model
        reads text itself, and for a sum or what is unloaded."""
        entry = self.entries.get(name)
        encoder = None if entry is None or entry.served is None else entry.served.encoder
        return encoder if isinstance(encoder, Tokenizer) else None

    def models(self) -> list[ModelInfo | OperationInfo]:
        """All that can be asked for by name: sums of rewards, models, and the critic's operations."""
        return [*self.infos(), *self.operations.values()]

    def model(self, name: str, version: str = "") -> ModelInfo | OperationInfo:
        """The model or operation of that name; raises UnknownModel, which names those that are served."""
        if version in ("", "1"):
            if name in self.sums:
                return self.sums[name].info
            if name in self.entries:
                return self.entries[name].info
            if name in self.operations:
                return self.operations[name]
        raise self._unknown(name, version)

    def scored_by(self, name: str) -> ModelInfo:
        """The model that a protocol means which may leave the name out: then the first one, the one named in the
        settings before all others, sums first. A checkpoint's own name will do, as its folder or hub id was given,
        where it is no other model's name.

        Raises UnknownModel, also where several models were loaded from what is named.
        """
        infos = self.infos()
        if not name:
            return infos[0]
        found = [info for info in infos if info.name == name] or [info for info in infos if info.source == name]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(info.name for info in found)
            raise UnknownModel(f"several models were loaded from {name!r}; ask for one by its name: {names}")
        raise UnknownModel(f"unknown model {name!r}; served here: {', '.join(info.name for info in infos)}")

    def _unknown(self, name: str, version: str = "") -> UnknownModel:
        asked = f"{name!r} version {version}" if version else repr(name)
        names = ", ".join(sorted(info.name for info in self.models()))
        return UnknownModel(f"unknown model {asked}; served here: {names} (version 1)")
