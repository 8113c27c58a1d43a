"""How a served reward model describes itself: the tensors it takes and gives, in KServe v2's and Triton's terms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from guerdon.core import ModelInfo

MODEL_VERSION = "1"
"""The one version under which every model is served; what changes is its weights_version."""

PLATFORM = "guerdon"

MAX_BATCH_SIZE = 9_999_999
"""What the model's config declares, so that batching clients batch; the server itself bounds by tokens."""


def metadata(info: ModelInfo) -> dict[str, Any]:
    """The model's metadata as KServe v2 defines it, with the batch axis in every shape."""

    def entries(specs: tuple[tuple[str, str, int], ...]) -> list[dict[str, Any]]:
        return [{"name": name, "datatype": datatype, "shape": [-1, width]} for name, datatype, width in specs]

    return {
        "name": info.name,
        "versions": [MODEL_VERSION],
        "platform": PLATFORM,
        "inputs": entries(input_specs(info)),
        "outputs": entries((*output_specs(info), ("errors", "BYTES", 1))),
    }


def config(info: ModelInfo) -> dict[str, Any]:
    """The model's configuration in Triton's terms: shapes without the batch axis, every input optional.

    `errors` is left out: clients ask for every output that stands here, and asking for it changes how a failed
    row is reported.
    """

    def entries(specs: tuple[tuple[str, str, int], ...], **more: Any) -> list[dict[str, Any]]:
        return [
            {"name": name, "data_type": _config_type(datatype), "dims": [width], **more}
            for name, datatype, width in specs
        ]

    return {
        "name": info.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": MAX_BATCH_SIZE,
        "input": entries(input_specs(info), optional=True),
        "output": entries(output_specs(info)),
    }


@lru_cache(maxsize=64)
def input_specs(info: ModelInfo) -> tuple[tuple[str, str, int], ...]:
    """Name, datatype and width (-1: any) of each input that the model takes."""
    specs: list[tuple[str, str, int]] = []
    if info.takes_text:
        specs.append(("sentences", "BYTES", 1))
    if info.takes_messages:
        specs.append(("messages", "BYTES", 1))
    if info.takes_tokens:
        specs += [("tokens", "INT64", -1), ("sequence_lengths", "INT64", 1), ("input_ids", "INT32", -1)]
    specs += [("group_ids", "INT64", 1), ("prompt_lengths", "INT64", 1)]
    if "step_rewards" in info.outputs:
        specs.append(("step_positions", "INT64", -1))
    return tuple(specs)


@lru_cache(maxsize=64)
def output_specs(info: ModelInfo) -> tuple[tuple[str, str, int], ...]:
    """Name, datatype and width (-1: any) of each output that the model's config lists."""
    widths = {"rewards": 1, "attributes": len(info.attribute_names) or -1}
    specs: list[tuple[str, str, int]] = [(name, "FP32", widths.get(name, -1)) for name in info.outputs]
    if "step_rewards" in info.outputs:
        specs.append(("step_counts", "INT64", 1))
    return (*specs, ("exceeded", "INT32", 1))


@lru_cache(maxsize=64)
def known_outputs(info: ModelInfo) -> tuple[str, ...]:
    """Every output that may be asked for."""
    return (*(name for name, _, _ in output_specs(info)), "errors")


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
