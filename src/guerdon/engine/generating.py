"""Token-by-token generation with a KV cache: prefill, decode steps, and the choice between two decoders.

Legend: B rows that are generated at once, V logits of a token.

`PackedDecoder` stores each prompt's keys and values once for all its rows and needs no padding: the packed forward, a
token at a time, for CPUs. `CachedDecoder` uses transformers' own cache, with a row for each response and prompts padded
on the left.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from guerdon.engine.attention import registry
from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.decoding import Decoding
from guerdon.engine.logprobs import LanguageEngine
from guerdon.engine.packing import pack
from guerdon.engine.self_check import TOLERANCE, checking, relative_difference
from guerdon.errors import CheckpointError, first_line

log = logging.getLogger(__name__)


class Decoder(Protocol):
    """Rows that grow by one token in each decode step, in the order in which they began.

    Make all other calls inside `running()`. `joins` says whether prompts may begin while other rows are under way, as
    in continuous batching.
    """

    joins: bool

    def running(self) -> AbstractContextManager[None]:
        """Sets the model up for the other calls inside the context."""

    def together(self, lengths: list[int]) -> int:
        """Returns how many of the first prompts of these lengths may begin at once; at least 1."""

    def begin(self, prompts: list[np.ndarray], counts: list[int]) -> Tensor:
        """Prefills the prompts, with so many new rows each; returns the logits `[B,V]` of the rows' first tokens."""

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row, int64 `[B]` on the model's device; returns the next token's logits `[B,V]`."""

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only the rows of these numbers, ascending int64."""


class PackedDecoder:
    """Decodes with the packed attention, over a cache that stores each prompt once."""

    joins = True

    def __init__(self, policy: LoadedPolicy, engine: LanguageEngine) -> None:
        """Raises NotImplementedError if the model cannot run packed or its states depend on what shares a batch."""
        if not engine.path.startswith("packed"):
            raise NotImplementedError("its forward does not run packed")
        if engine.length_classes.depend_on_length or engine.batcher.bounds_tokens:
            raise NotImplementedError("a token's state depends on what shares its batch")
        self._policy, self._engine = policy, engine
        self._decoding = Decoding()

    def running(self) -> AbstractContextManager[None]:
        return registry.attending(self._decoding)

    def together(self, lengths: list[int]) -> int:
        return len(lengths)

    def begin(self, prompts: list[np.ndarray], counts: list[int]) -> Tensor:
        engine = self._engine
        logits: list[Any] = [None] * len(prompts)
        self._decoding.begin([len(prompt) for prompt in prompts], counts)
        for batch in pack(prompts, budget=engine.max_batch_tokens, share=True):
            self._decoding.prompts = batch
            hidden = engine.run_trunk(**self._inputs(batch.tokens, batch.positions)).last_hidden_state[0]
            own = self._policy.head(hidden[engine.to_device(batch.last)])
            for row, of_row in zip(batch.rows, own, strict=True):
                logits[row] = of_row
        self._decoding.prompts = None
        return torch.stack(logits).repeat_interleave(engine.to_device(np.array(counts)), 0)

    def step(self, tokens: Tensor) -> Tensor:
        positions = _within(self._decoding.positions, self._policy.max_length)
        self._decoding.advance()
        logits: Tensor = self._policy.model(**self._inputs(tokens, positions)).logits[0]
        return logits

    def keep(self, rows: np.ndarray) -> None:
        self._decoding.keep(rows)

    def _inputs(self, tokens: Any, positions: np.ndarray) -> dict[str, Any]:
        device = self._engine.device
        return {
            "input_ids": torch.as_tensor(tokens, device=device)[None],
            # Without a mask transformers takes positions that restart for its own kind of packing.
            "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool, device=device),
            "position_ids": self._engine.to_device(positions)[None],
            "use_cache": False,
        }


class CachedDecoder:
    """Decodes with transformers' own cache and attention.

    If rotary frequencies depend on the longest sequence in a forward, only rows of one length class run at once.
    """

    joins = False

    def __init__(self, policy: LoadedPolicy, engine: LanguageEngine, *, pads: bool) -> None:
        """Without `pads` only prompts of the same length run at once, as models with a recurrent state need it."""
        self._policy, self._engine, self._pads = policy, engine, pads
        accepted = inspect.signature(policy.model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"
        self._cache: Any = None
        self._mask: Tensor | None = None
        self._positions = np.zeros(0, dtype=np.int64)

    def running(self) -> AbstractContextManager[None]:
        return self._engine.plain_attention()

    def together(self, lengths: list[int]) -> int:
        longest = 0
        for count, length in enumerate(lengths):
            longest = max(longest, length)
            is_alike = self._engine.length_classes.is_same(length, lengths[0]) if self._pads else length == lengths[0]
            if count and not (is_alike and (count + 1) * longest <= self._engine.max_batch_tokens):
                return count
        return len(lengths)

    def begin(self, prompts: list[np.ndarray], counts: list[int]) -> Tensor:
        engine, longest = self._engine, max(map(len, prompts))
        engine.length_classes.reset()
        tokens = np.full((len(prompts), longest), self._policy.pad_token_id)
        mask = np.zeros((len(prompts), longest), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            tokens[i, longest - len(prompt) :], mask[i, longest - len(prompt) :] = prompt, 1
        self._mask = None if mask.all() else engine.to_device(mask)
        self._cache = DynamicCache(config=self._policy.model.config)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        out = engine.run_trunk(**self._inputs(engine.to_device(tokens), positions))
        logits = self._policy.head(out.last_hidden_state[:, -1])
        self._positions = mask.sum(1)
        rows = np.repeat(np.arange(len(prompts)), counts)
        self.keep(rows)
        return logits[engine.to_device(rows)]

    def step(self, tokens: Tensor) -> Tensor:
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        positions = _within(self._positions, self._policy.max_length)
        self._positions = self._positions + 1
        logits: Tensor = self._policy.model(**self._inputs(tokens[:, None], positions[:, None])).logits[:, -1]
        return logits

    def keep(self, rows: np.ndarray) -> None:
        self._positions = self._positions[rows]
        if not len(rows):
            self._cache = self._mask = None
            return
        chosen = self._engine.to_device(rows)
        self._cache.reorder_cache(chosen)
        self._mask = None if self._mask is None else self._mask[chosen]

    def _inputs(self, tokens: Tensor, positions: np.ndarray) -> dict[str, Any]:
        inputs = {"input_ids": tokens, "use_cache": True, self._cache_name: self._cache}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask
        if self._takes_positions:
            inputs["position_ids"] = self._engine.to_device(positions)
        return inputs


def _within(positions: np.ndarray, max_length: int | None) -> np.ndarray:
    """Clips positions to the longest sequence: the model may have none beyond it.

    Only finished rows that were not dropped yet get there, and their logits are not read.
    """
    return positions if max_length is None else np.minimum(positions, max_length - 1)


PROBE_STEPS = 4
"""Tokens after the prompt in each row of the probe."""


class DecoderChoice:
    """Makes decoders of the best kind that agrees with the plain forward, checked once on a few short rows."""

    def __init__(self, policy: LoadedPolicy, engine: LanguageEngine) -> None:
        """Collective; all ranks choose the same kind. Raises CheckpointError if no kind agrees."""
        self._policy, self._engine = policy, engine
        # Three rows, two with the same prompt and one with a shorter one; and their logits `[T,V]` without a cache.
        random = np.random.default_rng(0)
        length = min(24, (policy.max_length or 24) - PROBE_STEPS)
        ids = np.setdiff1d(np.arange(policy.vocab_size), [policy.pad_token_id, *policy.eos_token_ids])
        prompts = [random.choice(ids, length), random.choice(ids, max(1, length - 7))]
        rows, want = [np.concatenate([prompts[i], random.choice(ids, PROBE_STEPS)]) for i in (0, 0, 1)], []
        with checking(engine.ranks), engine.gathered(), engine.no_gradients(), engine.plain_attention():
            for row in rows:
                engine.length_classes.reset()
                want.append(policy.model(input_ids=engine.to_device(row)[None], use_cache=False).logits[0])
        reasons = []
        for self.kind in ("packed", "padded", "alone") if engine.device.type == "cpu" else ("padded", "alone"):
            difference, refusal = 0.0, ""
            with checking(engine.ranks):
                try:
                    with engine.gathered(), engine.no_gradients():
                        difference = _difference(self.make(), rows, want, engine, alone=self.kind == "alone")
                except torch.OutOfMemoryError:  # it says nothing about the decoder
                    raise
                # A model may raise anything if it is called in a way that it does not support.
                except Exception as e:
                    refusal = first_line(e)[:120]
            found = engine.ranks.tell_all((difference, refusal))
            difference, refusals = max(other for other, _ in found), [other for _, other in found if other]
            if refusals:
                reasons.append(f"{self.kind}: {refusals[0]}")
                continue
            if difference <= TOLERANCE.get(engine.dtype, 5e-2):
                reasons.append(f"{self.kind}: agrees with the plain forward within {difference:.1e}")
                self.why = "; ".join(reasons)
                log.info("generation: %s", self.why)
                return
            reasons.append(f"{self.kind}: differs from the plain forward by {difference:.1e}")
        raise CheckpointError(
            f"{policy.origin.folder} cannot generate token by token: {'; '.join(reasons)}",
            "choose a model of another architecture",
        )

    def make(self) -> Decoder:
        """Returns a decoder without rows."""
        if self.kind == "packed":
            return PackedDecoder(self._policy, self._engine)
        return CachedDecoder(self._policy, self._engine, pads=self.kind == "padded")


def _difference(
    decoder: Decoder, rows: list[np.ndarray], want: list[Tensor], engine: LanguageEngine, *, alone: bool
) -> float:
    """Returns the largest difference of any row's and step's logits from those wanted, relative to their RMS.

    The first row is dropped on the way. All prompts begin at once, whatever the budget, unless the decoder takes only
    one, `alone`.
    """
    prompts, counts = [row[:-PROBE_STEPS] for row in rows[1:]], [2, 1]
    if alone:
        prompts, counts, rows, want = prompts[:1], counts[:1], rows[:2], want[:2]
    worst = 0.0
    with decoder.running():
        logits = decoder.begin(prompts, counts)
        for t in range(-PROBE_STEPS, 0):
            pairs = zip(logits, want, strict=True)
            worst = max(worst, *(relative_difference(of_row, wanted[t - 1]) for of_row, wanted in pairs))
            if t == -PROBE_STEPS // 2:
                decoder.keep(np.arange(1, len(rows)))
                rows, want = rows[1:], want[1:]
            logits = decoder.step(engine.to_device(np.array([row[t] for row in rows])))
    return worst
