"""Options that vLLM's and SGLang's forms for scores share: special tokens, truncation, activation, and the encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from guerdon.core import ScoreRequest, Truncation
from guerdon.errors import InvalidRequest
from guerdon.wire.forms.form import GroupBody, Switch, TokensUrl, Whole, refuses
from guerdon.wire.forms.labels import Activation, in_base64

EncodingFormat = Literal["float", "base64"] | None
Endianness = Literal["native", "little", "big"] | None


class OptionsUrl(TokensUrl, kw_only=True, forbid_unknown_fields=True):
    use_activation: Switch = None
    softmax: Switch = None
    activation: Switch = None


@refuses("mm_processor_kwargs media_io_kwargs", "this server reads texts and token ids")
class SampleOptions(GroupBody, kw_only=True):
    """`softmax` and `activation` are older names of `use_activation`."""

    priority: Whole | None = None
    add_special_tokens: bool | None = None
    padding: Literal["do_not_pad"] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=2**63 - 1, description="1 or more, or -1 for the model's own")] | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None


def with_options(request: ScoreRequest, body: SampleOptions, priority: int) -> ScoreRequest:
    """Returns the request with the body's options; raises InvalidRequest. Requests of a higher `priority` go first."""
    request.add_special_tokens = body.add_special_tokens if request.texts is not None else None
    request.priority = priority
    max_tokens = body.truncate_prompt_tokens
    if max_tokens is not None:
        if max_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens is 0; send 1 or more, or -1 for the model's own")
        # vLLM loads the tokenizers of pooling models so that they keep the beginning.
        request.truncation = Truncation(None if max_tokens == -1 else max_tokens, body.truncation_side or "right")
    return request


def use_activation(body: SampleOptions) -> bool | None:
    """Returns the switch under the first of its names that the body has, None if it has none."""
    wanted = (body.use_activation, body.softmax, body.activation)
    return next((value for value in wanted if value is not None), None)


def activation_of(body: SampleOptions) -> Activation | None:
    """Returns the activation of the scores: none unless the body requests one."""
    return "fitting" if use_activation(body) else None


def encoder(encoding: EncodingFormat, endianness: Endianness) -> Callable[[np.ndarray], Any]:
    """Returns what writes numbers: as lists, or their bytes as base64."""
    dtype = ">f4" if endianness == "big" else "<f4"
    return (lambda numbers: in_base64(numbers, dtype)) if encoding == "base64" else (lambda numbers: numbers)
