"""What the environment's part of NeMo-RL's YAML says, and the samples that it makes of conversations."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S
from guerdon.adapters.samples import refuse_unknown, samples_of
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import ConfigError
from guerdon.messages import plain

log = logging.getLogger(__name__)

Log = list[dict[str, Any]]
"""A conversation as NeMo-RL has it: messages that also have their token ids and more."""

_OF_TEMPLATES = re.compile(r"\s*(<s>|<bos>|<\|\w+\|>|<\w+_of_\w+>|\[INST\])")
"""How texts begin that a chat template has made."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings by their names there, and their defaults."""

    url: str | Sequence[str]
    model: str = "reward_model"
    send: str = "messages"
    suffix: str = ""
    labels: str | None = None
    timeout_s: float = TIMEOUT_S

    @classmethod
    def of(cls, cfg: Mapping[str, Any]) -> Settings:
        """Raises ConfigError where the URL is missing, and for what is unknown or no choice."""
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(cfg.keys() - known, "of the environment: ", ", ".join(known))
        if "url" not in cfg:
            raise ConfigError("the environment has no url", "give env.NAME.url, such as http://10.0.0.1:5555")
        settings = cls(**cfg)
        if settings.send not in ("messages", "texts"):
            raise ConfigError(f"the environment's send is {settings.send!r}", "choose messages or texts")
        return settings

    def samples(self, logs: Sequence[Log], metadata: Sequence[Any]) -> ScoreArgs:
        """What to ask for the last message of each log after those before it."""
        talks = [[{key: m[key] for key in ("role", "content", "tool_calls") if key in m} for m in log] for log in logs]
        prompts: list[Any] = [talk[:-1] for talk in talks]
        completions: list[Any] = [talk[-1:] for talk in talks]
        if self.send == "texts":
            texts = [[message["content"] for message in plain(talk)] for talk in talks]
            prompts, completions = ["".join(text[:-1]) for text in texts], [text[-1] for text in texts]
        asked = samples_of(prompts, completions, self.suffix)
        return asked if self.labels is None else {**asked, "labels": [entry[self.labels] for entry in metadata]}

    def warn_of_templates(self, talk: Log) -> None:
        """A word on the log where the server would put a chat template around a text that has had one already."""
        if self.send == "messages" and _OF_TEMPLATES.match(str(talk[0].get("content"))):
            log.warning(
                "the prompts begin as a chat template's, and the server puts another one around them: set send: texts "
                "for processors that apply one, as NeMo-RL's own do"
            )
