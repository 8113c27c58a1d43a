"""The critic that learns: global batches, the clipped value loss, optimiser steps and checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guerdon.core import ModelInfo, Score, Sequence
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.reward_models import LoadedModel
from guerdon.engine.engine import Engine
from guerdon.engine.layers import recompute_activations
from guerdon.errors import ConfigError, GuerdonError, Offloaded, RanksLost, SampleFailed, TrainFailed, describe
from guerdon.settings.config import FREEZING, LEARNING, CriticConfig
from guerdon.training import collectives, lora, trainer_checkpoint
from guerdon.training.algorithms.losses import ValueLossStats, clipped_value_loss
from guerdon.training.estimates import read_rows, with_estimates
from guerdon.training.optimiser import Optimiser, check_layout
from guerdon.training.trainer_checkpoint import TrainableWeights, TrainerCheckpoint
from guerdon.trees import flatten, whole_trees

FORMAT = 1
DIGITS = 12
"""Hex digits of the digest in a version."""
log = logging.getLogger(__name__)


class CriticTrainer(TrainableWeights):
    """A critic with its optimiser: it scores sequences, and learns from train requests, one at a time.

    Its weights are a function of the initial checkpoint and of the train requests since; bitwise on a CPU. With several
    ranks all of them get the same calls, and each computes its part of every global batch.
    """

    takes_all = False
    _corrupt = "which left the critic's weights corrupt: restart the server, which restores them"

    def __init__(self, loaded: LoadedModel, config: CriticConfig, ranks: Ranks = ALONE) -> None:
        """Raises ConfigError if a setting needs a missing library, or does not fit the model or the ranks.

        `ranks` are those that `loaded` was loaded with.
        """
        check_layout(config, ranks)
        self._config = config
        self._loaded = loaded
        self._ranks = ranks
        if config.lora is None:
            self._files = trainer_checkpoint.critic_files(loaded)
            if config.trainable is not None or config.frozen is not None:
                freeze(trainer_checkpoint.model_parameters(loaded), config.trainable, config.frozen)
        else:
            note = lora.add_adapters(loaded.trunk, config, loaded)
            self._files = {"adapter_config.json": trainer_checkpoint.to_json(note)}
        if config.activation_checkpointing:
            recompute_activations(loaded.trunk)
        self.engine = Engine(loaded)
        parameters = {f"trunk.{name}": p for name, p in loaded.trunk.named_parameters()}
        parameters |= {f"head.{name}": p for name, p in loaded.head.named_parameters()}
        self._num_parameters = sum(p.numel() for p in parameters.values())
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        summed = frozenset(f"trunk.{name}" for name in loaded.summed_over_tensor_ranks)
        self._optimiser = Optimiser(self._trained, config, ranks, summed)
        num_trained = sum(p.numel() for p in self._trained.values())
        part = f"{num_trained:,} of {self._num_parameters:,} parameters are trained"
        if config.lora is not None:
            part += f": adapters on {lora.adapted_share(loaded.trunk):.1%} of the layers' weights, and the head"
        log.info("%s: %s", config.name, part)
        facts = _settings_in_version(config) | self._must_match()
        facts |= {"attribute_weights": config.attribute_weights}
        for name in (*FREEZING, "attribute_weights"):  # without them versions stay as they were before
            if facts[name] is None:
                del facts[name]
        self._history = _digest(json.dumps(facts, sort_keys=True))
        self._covered = _settings_in_version(config)  # those that the history covers: a checkpoint's may be others
        self._lineage = 0
        self._is_offloaded = False
        self.run_token = ""
        self.encoder = loaded.encoder

    # ---------------------------------------------------------------------------------------- information

    @property
    def info(self) -> ModelInfo:
        """The served model that gives the critic's values, with the version of its weights at this moment."""
        return dataclasses.replace(
            self.engine.info, name=f"{self._config.name}_infer", weights_version=self.weights_version
        )

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of one forward, after prefix sharing."""
        return self.engine.max_batch_tokens

    @property
    def weights_version(self) -> str:
        """`<as loaded>+<step>.<digest>`, followed by the run's token and by the number of the last rollback.

        The digest covers the settings and all training data, so that different weights have different versions, even on
        two servers that began from the same checkpoint.
        """
        version = self._loaded.info.weights_version
        own = (self._config.attribute_weights, self._config.mean, self._config.std)
        if self._optimiser.step or own != (None, None, None):
            version += f"+{self._optimiser.step}.{self._history[:DIGITS]}"
            version += f"-run{self.run_token}" if self.run_token else ""
        return f"{version}-load{self._lineage}" if self._lineage else version

    def state(self) -> dict[str, Any]:
        """Returns the step, the next step's learning rate, the numbers of parameters, and the fault if weights are
        corrupt.
        """
        return {
            "broken": self._broken,
            "step": self._optimiser.step,
            "learning_rate": self._optimiser.learning_rate,
            "num_parameters": self._num_parameters,
            "num_trainable": sum(p.numel() for p in self._trained.values()),
        }

    # ---------------------------------------------------------------------------------------- scoring and learning

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` after every layer; returns False if the trunk has no visible layers."""
        return self.engine.watch(tick)

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Returns the value of every token, with the last one as reward. Raises Offloaded."""
        self.check_ready()
        return self.engine.score(sequences)

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """As `score`, by the plain forward. Raises Offloaded."""
        self.check_ready()
        return self.engine.score_plainly(sequences)

    def leave_path(self, why: str) -> None:
        """Makes every later forward the plain one, in training as well, as `Forward.leave_path`."""
        self.engine.leave_path(why)

    def train(self, request: TrainRequest, first_batches: int | None = None) -> TrainReport:
        """Makes an optimiser step per global batch in each of `request.updates` passes, or for the `first_batches`.

        A batch without any masked token makes no step. A step with a gradient that is not finite is skipped: it changes
        nothing, the schedule included. Raises TrainFailed if a batch fails on any rank; the batches before it are kept.
        All ranks return or raise the same; RanksLost if a rank is gone.
        """
        self.check_ready()
        one_pass = self._batches(request)
        batches = (one_pass * request.updates)[:first_batches]
        totals = _TrainTotals(self._optimiser.learning_rate, len(one_pass))
        failure = None
        try:
            for batch in batches:
                self._step(batch, totals)
        except RanksLost:
            # No answer to keep: what the other ranks did is unknown, and this process ends.
            raise
        # Devices and models raise anything, out of memory included.
        except Exception as e:
            log.exception("train request %s broke off", request.id)
            failure = str(e) if self._ranks.size > 1 and isinstance(e, GuerdonError) else describe(e)
            self.engine.reset_after_error()
        finally:
            self._optimiser.free()
        if failure is None:
            return self._report(request, totals)
        # Raised out here, because the error is kept and must not keep the frames that hold the activations.
        done = len(totals.losses)
        kept = f"the {done} before it are kept" if done else "nothing was changed"
        state = self._broken or f"{kept}, and the critic is at step {self._optimiser.step}"
        raise TrainFailed(f"global batch {done + 1} of {len(batches)} failed ({failure}): {state}", done)

    def validate(self, request: TrainRequest) -> TrainReport:
        """Returns the report that `train` would give for the current weights, without a step."""
        self.check_ready()
        batches = self._batches(request)
        totals = _TrainTotals(self._optimiser.learning_rate, len(batches))
        all_sums = self.engine.retry_plainly(lambda: self._measure(batches))
        for batch, sums in zip(batches, all_sums, strict=True):
            totals.add(batch, collectives.sum_over_parts(sums, self._ranks))
        return self._report(request, totals)

    def estimate(self, request: TrainRequest) -> TrainRequest:
        """Collective; returns the request with estimates by its rewards and current values, as `with_estimates`."""
        self.check_ready()
        table = self.engine.retry_plainly(lambda: self._value_table(request))
        collectives.sum_tables(table, self._ranks)
        return with_estimates(request, table.numpy())

    def _value_table(self, request: TrainRequest) -> Tensor:
        """Returns this rank's values at their places in the request's table, all others 0."""
        rows = read_rows(request.tokens, request.mask, int(self.engine.needs_last(self.engine.path)))
        numbers = list(rows)
        part = collectives.rows_of_this_rank(list(rows.values()), self._ranks)
        table = torch.zeros(request.mask.shape)
        with collectives.share_errors(self._ranks), self.engine.no_gradients():
            for at, values in self.engine.values([rows[numbers[i]] for i in part]):
                for i, own in zip(at, values, strict=bool(at)):
                    row = table[numbers[part[i]]]
                    row[: len(own)] = own[: len(row)].cpu()
        return table

    def _batches(self, request: TrainRequest) -> list[GlobalBatch]:
        return global_batches(request, self._config.global_batch_size)

    def _measure(self, batches: list[GlobalBatch]) -> list[ValueLossStats]:
        """Returns this rank's sums of each batch."""
        with collectives.share_errors(self._ranks), self.engine.no_gradients():
            return [sum((stats for _, stats in self._losses(batch)), ValueLossStats()) for batch in batches]

    def _step(self, batch: GlobalBatch, totals: _TrainTotals) -> None:
        own = self.engine.retry_plainly(lambda: self._add_gradients(batch))
        sums = collectives.sum_over_parts(own, self._ranks)
        if batch.num_tokens:
            self._optimiser.sum_over_ranks()
            totals.grad_norm = self._optimiser.gradient_norm()
            if math.isfinite(totals.grad_norm):
                totals.learning_rate = self._optimiser.learning_rate
                with self._changing_weights("a step broke off inside the optimiser"):
                    with collectives.share_errors(self._ranks):
                        self._optimiser.apply(totals.grad_norm)
                    if self._covered != (settings := _settings_in_version(self._config)):
                        self._history, self._covered = _digest(self._history + json.dumps(settings)), settings
                    # Whichever path computed it, the step's version is the same.
                    self._history = _digest(
                        self._history, *itertools.chain(*batch.read(self.engine.length_classes.depend_on_length))
                    )
                totals.num_steps += 1
            else:
                log.warning("skipped a step: the norm of its gradient is %s", totals.grad_norm)
                self._optimiser.free()
                totals.num_skipped += 1
        totals.add(batch, sums)

    def _add_gradients(self, batch: GlobalBatch) -> ValueLossStats:
        """Accumulates the gradients of this rank's part of the batch; drops them if any rank raises."""
        sums = ValueLossStats()
        try:
            with collectives.share_errors(self._ranks), torch.enable_grad():
                for loss, stats in self._losses(batch):
                    loss.backward()
                    self._optimiser.collect()
                    sums += stats
        except BaseException:
            self._optimiser.free()
            raise
        return sums

    def _losses(self, batch: GlobalBatch) -> Iterator[tuple[Tensor, ValueLossStats]]:
        """Yields this rank's share of the batch's loss for each micro-batch; call backward before taking the next."""
        clip = self._config.loss_clip_val
        rows, all_targets = batch.read(self.engine.needs_last(self.engine.path))
        part = collectives.rows_of_this_rank(rows, self._ranks)
        for numbers, values in self.engine.values([rows[i] for i in part]):
            if not numbers:
                # A filler: the other ranks wait in its backward pass.
                yield values[0].sum() * 0, ValueLossStats()
                continue
            targets = torch.from_numpy(np.concatenate([all_targets[part[i]] for i in numbers], axis=1))
            prev_values, returns, mask = targets.to(values[0].device)
            yield clipped_value_loss(torch.cat(values), prev_values, returns, mask, clip, batch.sum_mask)

    def _report(self, request: TrainRequest, totals: _TrainTotals) -> TrainReport:
        return TrainReport(
            id=request.id,
            step=self._optimiser.step,
            weights_version=self.weights_version,
            loss=_mean_loss(totals.passes[0]),
            losses=totals.losses,
            num_tokens=totals.num_tokens,
            clip_fraction=totals.passes[0].clip_fraction,
            explained_variance=totals.passes[0].explained_variance,
            grad_norm=totals.grad_norm,
            learning_rate=totals.learning_rate,
            num_steps=totals.num_steps,
            num_skipped=totals.num_skipped,
            pass_losses=[_mean_loss(sums) for sums in totals.passes],
            value_mean=totals.passes[0].value_mean,
            return_mean=totals.passes[0].return_mean,
        )

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Collective; writes everything that `load` needs into an existing, empty folder, fsynced. Raises
        StorageFailed.

        All ranks must pass the same folder. The files do not depend on the number of ranks.
        """
        self._check_whole()
        facts = {"lineage": self._lineage, "history": self._history, "weights_version": self.weights_version}
        facts |= {"settings": self._covered}
        self._checkpoint().write(folder, self._files, facts)

    def load(self, folder: Path, lineage: int | None = None) -> None:
        """Collective; restores a checkpoint bitwise, on whichever device the weights are.

        `lineage` is a number that no load had before: it makes all later versions differ from those of other training
        from this checkpoint. None continues the saved lineage. Raises CheckpointError, with nothing changed on any
        rank, if the folder is damaged or was made with another model or other settings.
        """
        with collectives.share_errors(self._ranks):
            facts, restore = self._checkpoint().open(folder)
        with self._changing_weights("a checkpoint was read only in part"):
            with collectives.share_errors(self._ranks):
                restore()
            self._history = facts["history"]
            self._covered = facts.get("settings", self._covered)  # checkpoints of 0.3.0 have none
            self._lineage = facts["lineage"] if lineage is None else lineage

    def _checkpoint(self) -> TrainerCheckpoint:
        return TrainerCheckpoint(
            self._stored_weights(),
            self._optimiser,
            self.engine.device,
            self._must_match(),
            _MISMATCHES,
            "checkpoint_dir",
            self._ranks,
        )

    def _stored_weights(self) -> dict[str, dict[str, Tensor]]:
        """Returns the model's tensors for its files: by the file's stem and the name in it."""
        if self._config.lora is None:
            return {"model": trainer_checkpoint.model_tensors(self._loaded)}
        trunk = self._loaded.trunk.named_parameters()
        adapted = {name: parameter.data for name, parameter in trunk if lora.is_adapter(name)}
        return {"adapter_model": lora.to_peft(adapted), "value_head": trainer_checkpoint.head_tensors(self._loaded)}

    def _must_match(self) -> dict[str, Any]:
        """Returns what must be equal when a checkpoint is loaded."""
        return {
            "format": FORMAT,
            "base": self._loaded.info.weights_version,
            "mean": self._loaded.head.mean,
            "std": self._loaded.head.std,
            "dtype": dtype_name(self.engine.dtype),
            **trainer_checkpoint.learning_settings(self._config),
            **{name: getattr(self._config, name) for name in FREEZING},
        }

    # ---------------------------------------------------------------------------------------- memory and faults

    def offload(self) -> None:
        """Moves weights and optimiser state to host memory; scoring and training are refused until `onload`."""
        self._is_offloaded = True
        self._optimiser.move(torch.device("cpu"))
        self.engine.offload()

    def onload(self) -> None:
        """Collective; moves them back to the device, completely and on all ranks, or not at all."""
        try:
            with collectives.share_errors(self._ranks):
                self.engine.onload()
                self._optimiser.move(self.engine.device)
        except Exception:
            self.offload()
            raise
        self._is_offloaded = False

    def check_ready(self) -> None:
        """Raises Offloaded, or ServerFault if a fault has corrupted the weights."""
        if self._is_offloaded:
            raise Offloaded(f"{self._config.name} is offloaded to host memory; call onload first")
        self._check_whole()


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimiser step that have a masked token.

    `rows` are int64 `[T_i]`, cut after the action of the last masked token: a causal model does not depend on later
    tokens. `targets` are float32 `[3, T_i]`: prev_values, returns and mask of these tokens, 0 for that action.
    `sum_mask` is the mask's sum over all of them, `num_tokens` the number of tokens with a mask above 0.
    """

    rows: list[np.ndarray]
    targets: list[np.ndarray]
    sum_mask: float
    num_tokens: int

    def read(self, with_action: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns rows and targets; those of the last actions are for models whose values depend on a row's length."""
        end = None if with_action else -1
        return [row[:end] for row in self.rows], [own[:, :end] for own in self.targets]


def global_batches(request: TrainRequest, size: int) -> list[GlobalBatch]:
    """Splits the request's rows in order into batches of `size`; the last one may be smaller.

    Trees are taken path by path, and never split: a batch ends before a tree that would exceed it.
    """
    flat, trees = flatten(request)
    batches = []
    for part in whole_trees(trees, size):
        mask = flat.mask[part]
        targets = np.stack([flat.prev_values[part], flat.returns[part], mask])
        rows = read_rows(flat.tokens[part], mask, num_more=1)
        own = [np.pad(targets[:, i, : len(row) - 1], ((0, 0), (0, 1))) for i, row in rows.items()]
        batches.append(GlobalBatch(list(rows.values()), own, float(mask.sum(dtype=np.float64)), int((mask > 0).sum())))
    return batches


class _TrainTotals:
    """Sums over the global batches of one request so far; `passes` has those of each pass over `num_batches`."""

    def __init__(self, learning_rate: float, num_batches: int) -> None:
        self.passes = [ValueLossStats()]
        self._num_batches = num_batches
        self.losses: list[float] = []
        self.num_tokens = self.num_steps = self.num_skipped = 0
        self.grad_norm = math.nan
        self.learning_rate = learning_rate

    def add(self, batch: GlobalBatch, sums: ValueLossStats) -> None:
        """Adds a finished global batch."""
        if self.losses and len(self.losses) % self._num_batches == 0:
            self.passes.append(ValueLossStats())
        self.passes[-1] += sums
        self.losses.append(_mean_loss(sums))
        self.num_tokens += batch.num_tokens


_MISMATCHES = {
    "base": "belongs to a critic of another model, weights",
    "mean": "belongs to a critic with another standardisation, mean",
    "std": "belongs to a critic with another standardisation, std",
}
"""Starts of the errors for checkpoints whose facts differ."""


def _settings_in_version(config: CriticConfig) -> dict[str, Any]:
    """Returns the settings that, besides the training data, decide the weights."""
    return {name: getattr(config, name) for name in (*LEARNING, "loss_clip_val")}


def _digest(before: str, *arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(before.encode(), digest_size=16)
    for array in arrays:
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _mean_loss(sums: ValueLossStats) -> float:
    return sums.sum_loss / max(sums.sum_mask, 1.0)


# ------------------------------------------------------------------------------------------ frozen weights

_MOST_NAMES = 4
"""Names that an error shows of the first weights, and of the last."""


def freeze(parameters: Mapping[str, nn.Parameter], trainable: str | None, frozen: str | None) -> None:
    """Leaves to train what `trainable` matches (None: everything) and `frozen` does not; freezes everything else.

    Both are regular expressions that match whole names. A frozen parameter gets no gradient. Call it before the first
    forward, because FSDP reads `requires_grad` there. Raises ConfigError if one matches nothing, or if nothing is left.
    """
    chosen = set(parameters) if trainable is None else _matching(parameters, "trainable", trainable)
    if frozen is not None:
        chosen -= _matching(parameters, "frozen", frozen)
    if not chosen:
        raise ConfigError(
            f"nothing is left to train: trainable is {trainable!r}, frozen {frozen!r}",
            f"change one of them; the weights are {_some(parameters)}",
        )
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)


def _matching(parameters: Mapping[str, nn.Parameter], setting: str, pattern: str) -> set[str]:
    found = {name for name in parameters if re.fullmatch(pattern, name)}
    if not found:
        raise ConfigError(
            f"{setting} is {pattern!r}, and matches no weight's whole name", f"the weights are {_some(parameters)}"
        )
    return found


def _some(parameters: Mapping[str, nn.Parameter]) -> str:
    names = list(parameters)
    if len(names) > 2 * _MOST_NAMES:
        names = [*names[:_MOST_NAMES], "...", *names[-_MOST_NAMES:]]
    return ", ".join(names)
