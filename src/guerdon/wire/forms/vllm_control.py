"""vLLM's control of a server by a trainer: sleep and wake, as its `entrypoints/serve/dev/sleep` has them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from guerdon.errors import InvalidRequest
from guerdon.wire.forms.form import Url

TAGS = ("weights", "kv_cache", "scheduling")
"""The parts that vLLM wakes one by one; here a model has weights alone, and wakes with any of them."""


class SleepUrl(Url, kw_only=True, forbid_unknown_fields=True):
    """The level is 0, 1 or 2, as a text."""

    level: Literal["0", "1", "2"] = "1"
    mode: Annotated[Literal["abort", "wait", "keep"], Meta(description="what becomes of accepted requests")] = "wait"


class WakeUrl(Url, kw_only=True, forbid_unknown_fields=True):
    tags: str = ""

    def __post_init__(self) -> None:
        if self.tags and self.tags not in TAGS:
            raise InvalidRequest(f"tags is {self.tags!r}, and may be {', '.join(TAGS)}")


class SleepReply(msgspec.Struct):
    """`freed_bytes` are those of each model's weights, on the first rank; 0 if it slept already."""

    status: Literal["sleeping"]
    level: int
    freed_bytes: dict[str, int]


class WakeReply(msgspec.Struct):
    status: Literal["awake"]
    models: list[str]
    tags: list[str] | None = None


class IsSleepingReply(msgspec.Struct):
    """Whether any model sleeps, and the level of each that does."""

    is_sleeping: bool
    levels: dict[str, int]
