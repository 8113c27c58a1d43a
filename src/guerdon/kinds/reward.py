"""Reward models, also those of steps: checkpoints that give numbers for samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.kinds.kind import Asks, Kind, Rows, SampleReader, Served, Subcommand, Tokenizer
from guerdon.kinds.samples import or_nothing
from guerdon.messages import with_reference
from guerdon.settings.config import ModelConfig
from guerdon.settings.sources import read_server_settings


class RewardKind(Kind):
    """A checkpoint with a head; its models are named by the architecture of that."""

    settings = ModelConfig
    command = Subcommand(
        "serve",
        "Serve reward models over HTTP and gRPC.",
        "config host port api_keys_file dtype device max_length max_batch_tokens tensor_parallel data_parallel",
        functools.partial(read_server_settings, cls=ModelConfig),
    )

    def load(self, config: ModelConfig, ranks: Any) -> Any:
        """Returns the engine over the checkpoint, or the first of several over one base model."""
        if config.isolate:
            raise ConfigError(
                f"isolate is on, but {config.model} is a checkpoint, which cannot be isolated", "leave it out there"
            )
        from guerdon.engine.checkpoint.reward_models import load_adapters, load_reward_model
        from guerdon.engine.engine import Engine
        from guerdon.engine.several_adapters import AdapterEngine

        if config.adapters:
            return AdapterEngine(load_adapters(config, ranks))
        return Engine(load_reward_model(config, ranks=ranks))

    def why_fixed(self, info: ModelInfo, what: str) -> str:
        """Returns that adapters that share a base model stay as they are."""
        return f"{info.name} shares {info.shared_base} with other adapters, and cannot be {what}" * bool(
            info.shared_base
        )

    async def read(self, reading: SampleReader, served: Served, request: ScoreRequest, cut: Truncation | None) -> Asks:
        """Reads the samples; separators in prompts end no step of the response.

        A label that conversations are rendered with goes with the last message, as its `reference`.
        """
        if served.info.takes_labels and request.messages and request.references:
            pairs = zip(request.messages, request.references, strict=True)
            messages = [one if label is None else with_reference(one, label) for one, label in pairs]
            request = dataclasses.replace(request, messages=messages)
        if not served.info.step_rule or request.tokens is not None or request.steps is not None:
            return await super().read(reading, served, request, cut)
        rows, request = await reading.read_samples(served, request, cut)
        tokenised = _by_steps if served.info.splits_at and not request.add_special_tokens else _without_prompts_steps
        rows = await tokenised(reading, served, request, rows)
        return await reading.make_sequences(rows, request, cut, served)


async def _by_steps(reading: SampleReader, served: Served, request: ScoreRequest, rows: Rows) -> Rows:
    """Tokenises a prompt and each step by itself: in one text a separator may merge with what stands before it."""
    prompts: ListLike[str | InvalidRequest] = [""] * len(rows)
    whole: ListLike[str | InvalidRequest] = request.texts or []
    if request.prompts is not None or request.messages is not None:
        prompts, joined = await reading.join(served, request)
        whole = whole or joined
    if request.splits is not None:
        prompts = [text[: at or 0] for text, at in zip(request.texts or [], request.splits, strict=True)]
    parts: list[list[str]] = []
    for row, prompt, text in zip(rows, prompts, whole, strict=True):
        if isinstance(row, InvalidRequest) or isinstance(text, InvalidRequest):
            parts.append([])
            continue
        begun = prompt if isinstance(prompt, str) and text.startswith(prompt) else ""
        parts.append([begun, *text[len(begun) :].split(served.info.splits_at)])
    distinct = list(dict.fromkeys(part for own in parts for part in own if part))
    asked = dataclasses.replace(request, messages=None, prompts=None, splits=None, texts=distinct)
    ids = dict(zip(distinct, await reading.read_text(served, asked, None), strict=True))
    end, nothing = np.array(served.info.step_separator_ids), np.empty(0, np.int64)

    def joined_again(row: Any, own: list[str]) -> Any:
        found: list[Any] = [ids.get(part, nothing) for part in own]
        if not own or not all(isinstance(part, np.ndarray) for part in found):
            return row
        prompt, *steps = found
        tokens = np.concatenate([prompt, *[x for step in steps for x in (step, end)][:-1]])
        return Sequence(tokens, prompt_length=len(prompt) or None) if len(tokens) else row

    return list(map(joined_again, rows, parts))


async def _without_prompts_steps(reading: SampleReader, served: Served, request: ScoreRequest, rows: Rows) -> Rows:
    """Notes in each row where its prompt's last step ends: separators in prompts end no step of the response."""
    if not isinstance(served.encoder, Tokenizer) or (request.prompts is None and request.messages is None):
        return rows
    prompts, _ = await reading.join(served, request)
    if request.texts is not None:
        prompts = [p if t.startswith(str(p)) else "" for p, t in zip(prompts, request.texts, strict=True)]
    distinct = list(dict.fromkeys(map(or_nothing, prompts)))
    asked = dataclasses.replace(request, messages=None, prompts=None, splits=None, texts=distinct)
    ids, alone = served.info.step_separator_ids, await reading.read_text(served, asked, None)
    num_steps = {
        prompt: len(Sequence(row).step_ends(ids)) if isinstance(row, np.ndarray) else 0
        for prompt, row in zip(distinct, alone, strict=True)
    }

    def noted(row: Any, prompt: str | InvalidRequest) -> Any:
        if isinstance(row, InvalidRequest):
            return row
        made = row if isinstance(row, Sequence) else Sequence(row)
        before = made.step_ends(ids)[: num_steps[or_nothing(prompt)]]
        return dataclasses.replace(made, prompt_length=int(before[-1]) + 1 if len(before) else None)

    return [noted(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
