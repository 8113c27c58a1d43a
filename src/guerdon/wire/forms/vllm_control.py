"""vLLM's control of a server by a trainer: sleep and live weights.

The routes are those of its `entrypoints/serve/dev/sleep` and `entrypoints/rl/online`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from guerdon.errors import InvalidRequest, Unsupported
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


class UpdateUrl(Url, kw_only=True, forbid_unknown_fields=True):
    """`update_id` is what the start returned: messages of another trainer's update are refused."""

    update_id: str = ""


class InitInfo(msgspec.Struct, kw_only=True):
    """With an `ema` the served weights become `ema` times themselves plus the rest of the new ones.

    While an update is swapped in requests wait; with `beside` the old weights answer, and both models are in memory.
    """

    ema: float = 0.0
    beside: bool = False
    master_address: Any = None
    packed: Any = None


class InitBody(msgspec.Struct, kw_only=True):
    """The settings of all updates that follow."""

    example: ClassVar[str] = '{"init_info": {"ema": 0.99}}'
    init_info: InitInfo

    def check(self) -> InitInfo:
        """Returns the settings; raises Unsupported for vLLM's transports between GPUs."""
        if self.init_info.master_address is not None or self.init_info.packed is not None:
            raise Unsupported("weights come by HTTP or by files: NCCL and CUDA IPC, between GPUs, are not supported")
        return self.init_info


class UpdateInfo(msgspec.Struct, kw_only=True):
    """`file` is one of safetensors in the folder of --weight-transfer, which may be /dev/shm."""

    file: str


class UpdateBody(msgspec.Struct, kw_only=True):
    """Tensors, in one file or several; the body may be safetensors itself instead."""

    example: ClassVar[str] = '{"update_info": {"file": "step-10.safetensors"}}'
    update_info: UpdateInfo | Annotated[list[UpdateInfo], Meta(min_length=1)]

    def files(self) -> list[str]:
        """Returns the files' names."""
        infos = self.update_info if isinstance(self.update_info, list) else [self.update_info]
        return [info.file for info in infos]


class FinishBody(msgspec.Struct, kw_only=True):
    """A `weight_version` is the trainer's own name for the weights, which comes back."""

    example: ClassVar[str] = '{"weight_version": "step-10"}'
    weight_version: str | None = None


class PhaseReply(msgspec.Struct, kw_only=True):
    """`update_id` after the start, `missing` tensors after an update; `weights_version` serves at the start, or since
    the end.
    """

    message: str
    update_id: str | None = None
    missing: int | None = None
    weights_version: str | None = None
    weight_version: str | None = None
