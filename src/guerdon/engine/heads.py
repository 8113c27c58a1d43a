"""From hidden states to scores or logits: the float32 reward head with its rules, and a language model's output head.

Legend: N hidden states, H hidden size, A attributes, T tokens, B sequences, V logits of a token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from guerdon import tensor_files
from guerdon.core import Score, Sequence
from guerdon.engine.caught_calls import RowProducts
from guerdon.engine.fsdp import NOT_SHARDED, Fsdp, shallow_copy
from guerdon.engine.microbatches import to_device
from guerdon.engine.onednn import with_row_products
from guerdon.errors import CheckpointError, SampleFailed, Unsupported
from guerdon.teacher_core import HeadFile

Pooling = Literal["last", "last_non_pad", "first", "mean", "first_eos"]
Reduction = Literal["min", "mean", "last", "product"]

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest accepted difference of an output head's logits from the whole model's, relative to their root mean square."""


@dataclass(frozen=True)
class StepRule:
    """Where a process reward model's steps end, and how the steps' rewards are reduced to one.

    `separator_ids` are the tokens of the separator alone, empty if the checkpoint has no tokenizer. Requests must send
    step positions then, and also if the tokenizer merges the separator with the text before it.
    """

    separator: str
    separator_ids: tuple[int, ...]
    reduction: Reduction = "min"

    def __str__(self) -> str:
        return f"{self.reduction} of the steps that end with {self.separator!r}, tokens {list(self.separator_ids)}"


class RewardHead(nn.Module):
    """The scoring head: a float32 module for hidden states, and the rules that turn its outputs into scores.

    `module` maps `[N,H]` to `[N,A]`. A `per_token` head is applied to every token, any other to the state that
    `pooling` chooses. If `steps` is set, two outputs are the logits of a wrong and a right step. The reward is the
    attributes' sum weighted by `weights` (float64 `[A]`), minus `mean`, divided by `std`; so are per-token values.
    With `gate_ids` the module maps `[N,2H]`, where the second state is of the token at which these ids stand last.
    Attributes stay raw outputs, step rewards stay probabilities, or what the only output says.
    """

    def __init__(
        self,
        module: nn.Module,
        num_outputs: int,
        pooling: Pooling,
        *,
        per_token: bool = False,
        weights: np.ndarray | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        steps: StepRule | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        gate_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.module = module.float()
        self.num_outputs = num_outputs
        self.pooling: Pooling = pooling
        self.per_token = per_token
        self.weights = np.full(num_outputs, 1 / num_outputs) if weights is None else weights
        self.mean = mean
        self.std = std
        self.steps = steps
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.gate_ids = gate_ids

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns raw outputs, float32 `[N,A]`, for hidden states `[N,H]` of any dtype."""
        with torch.autocast(hidden.device.type, enabled=False), RowProducts():
            return self.module(hidden.float())

    def merged(self, outputs: Tensor) -> Tensor:
        """Merges and standardises raw outputs `[N,A]` as `to_scores` does; float32 `[N]`, differentiable."""
        weights = to_device(self.weights, outputs.device)
        return (((outputs.double() * weights).sum(1) - self.mean) / self.std).float()

    def positions(self, rows: list[np.ndarray]) -> np.ndarray:
        """Returns the index (int64 `[B]`) of the token in each row that its reward is read from; not for `mean`.

        `last_non_pad` is the last token that is not `pad_token_id`, or the first token if all are pads, as in
        transformers. `first_eos` is the first EOS, or the last token if there is none.
        """
        if self.pooling == "first":
            return np.zeros(len(rows), dtype=np.int64)
        positions = np.array([len(row) - 1 for row in rows], dtype=np.int64)
        for i, row in enumerate(rows):
            if self.pooling == "last_non_pad" and row[-1] == self.pad_token_id:
                num_pads = int((row[::-1] != self.pad_token_id).argmax())  # 0 if all are
                positions[i] = positions[i] - num_pads if num_pads else 0
            elif self.pooling == "first_eos":
                is_eos = row == self.eos_token_id
                if is_eos.any():
                    positions[i] = is_eos.argmax()
        return positions

    def gate_position(self, row: np.ndarray) -> int:
        """Returns the index of the token that begins the last `gate_ids` in the row, 0 if there are none."""
        ends = Sequence(row).step_ends(self.gate_ids)
        return int(ends[-1]) - len(self.gate_ids) + 1 if len(ends) else 0

    @property
    def rule(self) -> str:
        """The rule that chooses the reward's token, for users; empty if the reward comes from steps."""
        if self.steps is not None:
            return ""
        return f"last_non_pad (pad {self.pad_token_id})" if self.pooling == "last_non_pad" else self.pooling


def to_scores(head: RewardHead, logits: Tensor, sequences: list[Sequence]) -> list[Score | SampleFailed]:
    """Returns one result for each sequence, from the head's outputs on the host.

    These are `[B,A]`, or `[T,A]` for a per-token head, one sequence's tokens after the other's. A sample whose numbers
    are not finite, or that has no step to reward, becomes a SampleFailed; the others are not affected.
    """
    if head.per_token:
        return _step_scores(head, logits, sequences) if head.steps else _value_scores(head, logits, sequences)
    attributes = logits.numpy()
    rewards = _standardise(head, (attributes * head.weights).sum(axis=1))
    is_fine = np.isfinite(attributes).all(axis=1) & _fits(rewards)
    several = head.num_outputs > 1
    return [
        Score(reward=reward, attributes=row if several else None) if fine else _failed("reward", row)
        for reward, row, fine in zip(rewards.tolist(), attributes, is_fine.tolist(), strict=True)
    ]


class Outputs:
    """What an engine's head makes of distinct rows, micro-batch by micro-batch; `slots` are the sequences' rows."""

    def __init__(self, engine: Any, sequences: list[Sequence], rows: list[np.ndarray], slots: list[int]) -> None:
        self._engine, self._sequences, self._rows, self._slots = engine, sequences, rows, slots
        self._made: list[Tensor] = []
        self._own = [np.empty(0, dtype=np.int64)] * len(rows)  # indices into all outputs: one, or one a token
        self._num_made = 0
        self._ends: dict[int, np.ndarray] = {}
        if (steps := engine.head.steps) is not None:
            for s, slot in zip(sequences, slots, strict=True):
                last = self._ends.get(slot, len(s.tokens) - 1)
                self._ends[slot] = np.union1d(last, s.step_ends(steps.separator_ids))

    def add(self, states: Any) -> None:
        """Applies the head to the states of some of the rows."""
        if not states.rows:
            return
        hidden, places = self._engine.read_states(states, self._rows, self._ends)
        for row, place in zip(states.rows, places, strict=True):
            self._own[row] = self._num_made + place
        self._made.append(self._engine.head(hidden))
        self._num_made += len(self._made[-1])

    def scores(self) -> list[Score | SampleFailed]:
        """Returns one result for each sequence, in order."""
        if not self._sequences:
            return []
        # Nothing before this line waits for the device.
        every = np.concatenate([self._own[slot] for slot in self._slots])
        return to_scores(self._engine.head, torch.cat(self._made).cpu()[torch.from_numpy(every)], self._sequences)


def _value_scores(head: RewardHead, logits: Tensor, sequences: list[Sequence]) -> list[Score | SampleFailed]:
    values = _standardise(head, (logits.numpy() * head.weights).sum(axis=1)).astype(np.float32)
    lengths = np.array([len(s.tokens) for s in sequences])
    starts = np.cumsum(lengths) - lengths
    if head.pooling == "mean":
        rewards = np.add.reduceat(values, starts, dtype=np.float64) / lengths
    else:
        rewards = values[starts + head.positions([s.tokens for s in sequences])]
    is_fine = np.logical_and.reduceat(np.isfinite(values), starts)
    return [
        Score(reward=reward, values=row) if fine else _failed("values", row)
        for reward, row, fine in zip(rewards.tolist(), np.split(values, starts[1:]), is_fine.tolist(), strict=True)
    ]


def _step_scores(head: RewardHead, logits: Tensor, sequences: list[Sequence]) -> list[Score | SampleFailed]:
    assert head.steps is not None
    positions = [s.step_ends(head.steps.separator_ids) for s in sequences]
    lengths = np.array([len(s.tokens) for s in sequences])
    starts = np.cumsum(lengths) - lengths
    flat = np.concatenate([start + p for start, p in zip(starts, positions, strict=True)])
    chosen = logits[torch.from_numpy(flat)]
    is_right = (torch.softmax(chosen, dim=-1) if head.num_outputs == 2 else chosen)[:, -1].numpy()
    results: list[Score | SampleFailed] = []
    for steps in np.split(is_right, np.cumsum([len(p) for p in positions])[:-1]):
        if len(steps) == 0:
            results.append(SampleFailed("no step to reward"))  # requests are refused before
        elif not np.isfinite(steps).all():
            results.append(_failed("step rewards", steps))
        else:
            reward = _standardise(head, _REDUCE[head.steps.reduction](steps.astype(np.float64)))
            fine = _fits(reward).all()
            results.append(Score(float(reward), steps=steps) if fine else _failed("reward", np.atleast_1d(reward)))
    return results


_REDUCE: dict[Reduction, Callable[[np.ndarray], Any]] = {
    "min": np.min, "mean": np.mean, "product": np.prod, "last": lambda steps: steps[-1]
}  # fmt: skip


def _standardise(head: RewardHead, rewards: np.ndarray) -> np.ndarray:
    return (rewards - head.mean) / head.std


def _fits(rewards: np.ndarray) -> np.ndarray:
    """Returns which rewards, float64, are finite as float32, the dtype of replies."""
    with np.errstate(over="ignore"):
        return np.isfinite(rewards.astype(np.float32))


def _failed(what: str, numbers: np.ndarray) -> SampleFailed:
    bad = int(np.argmin(_fits(numbers)))
    where = f" at index {bad} of {len(numbers)}" if len(numbers) > 1 else ""
    return SampleFailed(
        f"the model's {what} for this sample is not finite: {numbers[bad]}{where}; "
        "if other samples fail likewise, try --dtype float32 or bfloat16"
    )


class GatedHead(nn.Module):
    """Objectives, and last their sum weighted by a gate: maps `[N,H]`, or `[N,2H]` with `reads_two`, to `[N,A+1]`.

    `weight` is `[A,H]`, and `transform` `[A,A]` is applied to the objectives before they are summed. The gate reads
    the second state if there are two.
    """

    def __init__(self, weight: Tensor, gate: nn.Module, transform: Tensor, reads_two: bool) -> None:
        super().__init__()
        self.weight, self.gate, self.reads_two = nn.Parameter(weight), gate, reads_two
        self.transform = nn.Parameter(transform)

    def forward(self, hidden: Tensor) -> Tensor:
        own, gating = hidden.chunk(2, -1) if self.reads_two else (hidden, hidden)
        objectives = nn.functional.linear(own.contiguous(), self.weight)
        summed = (self.gate(gating.contiguous()) * (objectives @ self.transform)).sum(-1, keepdim=True)
        return torch.cat([objectives, summed], -1)


LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits that an output head makes at once, on a CPU 64 MiB in float32; soft caps and scales make up to two copies."""


class TokenHead(nn.Module):
    """A reward that is read from a language model's logits of the tokens `ids`: maps `[N,H]` to `[N,1]`.

    Its `form` is the first token's logit, the difference of two, or the first token's probability, among the given
    tokens or all. The language model keeps its dtype.
    """

    def __init__(self, model: Any, output: OutputHead, ids: list[int], form: str, among: str) -> None:
        super().__init__()
        self.model, self.output, self.ids, self.form, self.among = model, output, ids, form, among

    def float(self) -> TokenHead:
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        made = []
        for some in hidden.to(weight.dtype).split(max(1, LOGITS.get(hidden.device.type, 1 << 26) // len(weight))):
            logits = self.output(some).float()
            if self.form == "probability" and self.among == "all":
                logits = torch.softmax(logits, -1)
            given = logits[:, self.ids]
            if self.form == "probability" and self.among == "given":
                given = torch.softmax(given, -1)
            made.append(given[:, :1] - given[:, 1:] if self.form == "difference" else given[:, :1])
        return torch.cat(made)

    def __str__(self) -> str:
        return f"{self.form} of token {' and '.join(map(str, self.ids))}{' among all' * (self.among == 'all')}"


class OutputHead:
    """Logits from hidden states by a language model's own code, with its scaling, soft caps, biases and tied weights.

    Runs the model's forward with a stub trunk that returns the states, each of `width` numbers.
    """

    width = 0

    def __init__(self, model: Any, trunk: Any, folder: Path, fsdp: Fsdp = NOT_SHARDED) -> None:
        """Raises CheckpointError if the logits differ from those of the whole model."""
        self._model, self._trunk, self._fsdp = model, trunk, fsdp
        self._name = next(name for name, child in model.named_children() if child is trunk)
        self._output: Any = None
        try:
            with self._fsdp.no_gradients():
                difference = self._difference()
        # Models may raise anything if their forward reads more from the trunk than hidden states.
        except Exception as e:
            why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        else:
            if difference <= AGREEMENT.get(model.dtype, 2e-2):
                return
            if math.isnan(difference):
                raise CheckpointError(
                    f"the logits of {folder}, a {type(model).__name__}, are not finite",
                    "copy it again if its weights are NaN or infinite; else try --dtype float32 or bfloat16",
                )
            why = f"they differ by {difference:.1e}"
        raise CheckpointError(
            f"the logits of {folder}, a {type(model).__name__}, cannot be computed from its last hidden states: {why}",
            "choose a model of another architecture",
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits `[N,V]` in the model's dtype for hidden states `[N,H]`, differentiable."""
        # Copy at each call: adapters may have replaced modules since. The copy shares modules and parameters.
        model = self._fsdp.below_root(self._model)
        model._modules = {
            name: self._stand_in(child) if name == self._name else with_row_products(child)
            for name, child in self._model._modules.items()
        }
        with RowProducts():
            return model(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def _stand_in(self, module: Any) -> Any:
        passes = shallow_copy(module)
        # OPT's model bypasses its trunk and calls the decoder in it.
        children = {name: self._stand_in(child) for name, child in module.named_children() if name == "decoder"}
        passes._modules = {**module._modules, **children}
        passes.forward = lambda *_, inputs_embeds, **__: self._output(last_hidden_state=inputs_embeds)
        return passes

    def _difference(self) -> float:
        """Returns the largest difference from the whole model's logits for a few tokens, NaN if not finite."""
        seen: list[Any] = []
        hook = self._trunk.register_forward_hook(lambda _, __, output: seen.append(output))
        tokens = torch.arange(8, device=self._model.device)[None] % self._model.get_input_embeddings().num_embeddings
        try:
            want = self._model(input_ids=tokens, use_cache=False).logits[0]
            if not seen:
                seen.append(self._fsdp.through_root(self._trunk)(input_ids=tokens, use_cache=False))
        finally:
            hook.remove()
        if not want.isfinite().all():
            return float("nan")
        self._output, self.width = type(seen[0]), seen[0].last_hidden_state.shape[-1]
        got = self(seen[0].last_hidden_state[0])
        if got.shape != want.shape:
            return float("inf")
        worst = ((got - want).float().abs().max() / want.float().square().mean().sqrt()).item()
        return worst if np.isfinite(worst) else float("inf")


# --------------------------------------------------------------------------------- an output head as a file

PIECE_BYTES = 8 << 20

_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1, "logits_scaling": -1}
"""Settings of transformers' models that scale logits, and the power in which they do."""
_SOFT_CAP = "final_logit_softcapping"

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def export_head(model: Any, head: OutputHead, name: str, weights_version: str) -> HeadFile:
    """Returns the head of the model as a safetensors file, so that a trainer makes logits of hidden states itself.

    The file has `weight` `[V,H]` and, if the head has one, `bias` `[V]`, in the model's dtype. With the metadata's
    `logit_scale` s (1 if missing) and `soft_cap` c (no cap if missing), the logits of hidden states h are

        logits = (h @ weight.T + bias) * s        and with a cap        c * tanh(logits / c)

    Raises Unsupported if the logits need more than this file can express.
    """
    output = model.get_output_embeddings()
    tensors: dict[str, Tensor] = {"weight": output.weight.detach()}
    if getattr(output, "bias", None) is not None:
        tensors["bias"] = output.bias.detach()
    config = model.config.get_text_config()
    scale = math.prod(float(getattr(config, key, None) or 1.0) ** power for key, power in _SCALES.items())
    soft_cap = getattr(config, _SOFT_CAP, None)
    if not _is_all(head, tensors, scale, soft_cap):
        raise Unsupported(
            f"the logits of {name} are not one matrix times its hidden states, as a head's file requires; "
            "request log-probs instead"
        )
    metadata = {"format": "pt", "logit_scale": repr(scale)}
    if soft_cap:
        metadata["soft_cap"] = repr(float(soft_cap))
    hashing = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for piece in _pieces(tensors):
        hashing.update(piece)
    metadata |= {"digest": hashing.hexdigest(), "weights_version": weights_version}
    described = {name: (_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    header = tensor_files.header(described, metadata)

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        yield from _pieces(tensors)

    return HeadFile(metadata["digest"], weights_version, len(header) + sum(x.nbytes for x in tensors.values()), pieces)


def rebuild(hidden: Tensor, tensors: dict[str, Tensor], scale: float, soft_cap: float | None) -> Tensor:
    """Returns the logits `[N,V]` of hidden states `[N,H]`."""
    logits = torch.nn.functional.linear(hidden, tensors["weight"], tensors.get("bias")) * scale
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def _is_all(head: OutputHead, tensors: dict[str, Tensor], scale: float, soft_cap: float | None) -> bool:
    """Whether the logits equal the model's own."""
    weight = tensors["weight"]
    if weight.shape[1] != head.width:
        return False
    states = torch.randn(8, head.width, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        want, got = head(states).float(), rebuild(states, tensors, scale, soft_cap).float()
    difference = ((got - want).abs().max() / want.square().mean().sqrt()).item()
    return difference <= AGREEMENT.get(weight.dtype, 2e-2)


def _pieces(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    """Yields the tensors' bytes in order, a few MiB at a time; copies only those that are on another device."""
    for tensor in tensors.values():
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES].cpu().numpy().data
