"""The critic that learns: global batches, the clipped value loss over micro-batches, the step, and its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.core import ModelInfo, Score, Sequence, TrainReport, TrainRequest
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.files import find_folder
from guerdon.engine.checkpoint.loading import LoadedModel
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.engine import Engine
from guerdon.engine.recompute import recompute_activations
from guerdon.errors import GuerdonError, Offloaded, RanksLost, SampleFailed, ServerFault, TrainFailed
from guerdon.settings.config import LEARNING, CriticConfig
from guerdon.training import collectives, lora, trainer_checkpoint
from guerdon.training.algorithms.losses import ValueLossStats, clipped_value_loss
from guerdon.training.batches import GlobalBatch, global_batches
from guerdon.training.optimiser import Optimiser, check_layout
from guerdon.training.trainer_state import TrainerState

FORMAT = 1
DIGITS = 12
"""Of the digest in a version."""
log = logging.getLogger(__name__)


class CriticTrainer:
    """A critic with its optimiser: it scores, and it learns from train requests, one at a time.

    Its weights are a function of the checkpoint that it began from and of what it was trained on since; on a CPU
    bitwise. Many ranks do it together: each is given the same, and computes its part of every global batch.
    """

    takes_all = False

    def __init__(self, loaded: LoadedModel, config: CriticConfig, ranks: Ranks = ALONE) -> None:
        """`ranks` are those that `loaded` was loaded with.

        Raises ConfigError where a setting needs a library that is not there, or does not fit the model or the ranks.
        """
        check_layout(config, ranks)
        self._config = config
        self._loaded = loaded
        self._ranks = ranks
        if config.lora is None:
            folder = find_folder(loaded.config.model, loaded.config.revision)
            self._files = trainer_checkpoint.critic_files(loaded, folder)
        else:
            lora.add_adapters(
                loaded.trunk,
                config.lora,
                config.lora_alpha,
                config.lora_targets,
                no_gradients=loaded.gathering.no_gradients,
            )
            note = lora.describe_adapters(loaded.trunk, loaded.config.model)
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
        part = f"{num_trained:,} of {self._num_parameters:,} parameters train"
        if config.lora is not None:
            part += f": adapters on {lora.adapted_share(loaded.trunk):.1%} of the layers' weights, and the head"
        log.info("%s: %s", config.name, part)
        self._history = _digest(json.dumps({**_decisive(config), **self._made_with()}, sort_keys=True))
        self._lineage = 0
        self._is_offloaded = False
        self._broken = ""
        self.run_token = ""
        self.encoder = loaded.encoder

    # ---------------------------------------------------------------------------------------- what it is

    @property
    def info(self) -> ModelInfo:
        """The critic's values as a served model, under the version of its weights at this moment."""
        return dataclasses.replace(
            self.engine.info, name=f"{self._config.name}_infer", weights_version=self.weights_version
        )

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of one forward, after sharing."""
        return self.engine.max_batch_tokens

    @property
    def weights_version(self) -> str:
        """`<as loaded>+<step>.<digest>`; behind it the run's token and the load that went back to a checkpoint.

        The digest is of the settings and of all that was learnt from, so that other weights have another version, also
        those of another server that began from the same checkpoint.
        """
        version = self._loaded.info.weights_version
        if self._optimiser.step:
            version += f"+{self._optimiser.step}.{self._history[:DIGITS]}"
            version += f"-run{self.run_token}" if self.run_token else ""
        return f"{version}-load{self._lineage}" if self._lineage else version

    def state(self) -> dict[str, Any]:
        """Step, learning rate of the next step, how many parameters there are and are trained; what broke, if any."""
        return {
            "broken": self._broken,
            "step": self._optimiser.step,
            "learning_rate": self._optimiser.learning_rate,
            "num_parameters": self._num_parameters,
            "num_trainable": sum(p.numel() for p in self._trained.values()),
        }

    # ---------------------------------------------------------------------------------------- scoring and learning

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` whenever a layer has run; False where the trunk shows no layers."""
        return self.engine.watch(tick)

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """The value of every token; the reward is the last one's. Raises Offloaded."""
        self.check_ready()
        return self.engine.score(sequences)

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """As `score`, by the plain forward. Raises Offloaded."""
        self.check_ready()
        return self.engine.score_plainly(sequences)

    def train(self, request: TrainRequest, first_steps: int | None = None) -> TrainReport:
        """One optimiser step a global batch, of which `first_steps` bounds the number.

        A batch without a token that counts makes no step, and none whose gradient is not finite; such steps change
        nothing, the schedule included. Raises TrainFailed where it breaks off on any rank: what was done before it
        stands. All ranks report, or raise, the same; RanksLost where one of them is not there any more.
        """
        self.check_ready()
        batches = self._batches(request)[:first_steps]
        tally = _Tally(self._optimiser.learning_rate)
        failure = None
        try:
            for batch in batches:
                self._learn(batch, tally)
        except RanksLost:
            # No answer to keep: nobody knows what the others did, and this process ends.
            raise
        # Whatever a device or a model raises, out of memory included.
        except Exception as e:
            log.exception("train request %s broke off", request.id)
            failure = str(e) if self._ranks.size > 1 and isinstance(e, GuerdonError) else f"{type(e).__name__}: {e}"
            self.engine.forget_broken()
        finally:
            self._optimiser.free()
        if failure is None:
            return self._report(request, tally)
        # Raised out here, so that it does not carry the frames that hold the activations: this error is kept.
        done = len(tally.losses)
        stands = f"the {done} before it stand" if done else "nothing was changed"
        what = self._broken or f"{stands}, and the critic is at step {self._optimiser.step}"
        raise TrainFailed(f"global batch {done + 1} of {len(batches)} failed ({failure}): {what}", done)

    def validate(self, request: TrainRequest) -> TrainReport:
        """What `train` would report of the weights as they are, without a step."""
        self.check_ready()
        tally = _Tally(self._optimiser.learning_rate)
        batches = self._batches(request)
        for batch, sums in zip(
            batches, collectives.together(self._ranks, lambda: self._measured(batches)), strict=True
        ):
            tally.add(batch, collectives.sum_over_parts(sums, self._ranks))
        return self._report(request, tally)

    def _batches(self, request: TrainRequest) -> list[GlobalBatch]:
        return global_batches(request, self._config.global_batch_size, with_action=self.engine.depends_on_length)

    def _measured(self, batches: list[GlobalBatch]) -> list[ValueLossStats]:
        """What this rank's part of each batch comes to."""
        with self.engine.no_gradients():
            return [sum((stats for _, stats in self._losses(batch)), ValueLossStats()) for batch in batches]

    def _learn(self, batch: GlobalBatch, tally: _Tally) -> None:
        own = collectives.together(self._ranks, lambda: self._add_gradients(batch))
        sums = collectives.sum_over_parts(own, self._ranks)
        if batch.num_tokens:
            self._optimiser.sum_over_ranks()
            tally.grad_norm = self._optimiser.gradient_norm()
            if math.isfinite(tally.grad_norm):
                tally.learning_rate = self._optimiser.learning_rate
                with self._changing("a step broke off inside the optimiser"):
                    norm = tally.grad_norm
                    collectives.together(self._ranks, lambda: self._optimiser.apply(norm))
                    self._history = _digest(self._history, *batch.rows, *batch.targets)
                tally.num_steps += 1
            else:
                log.warning("a step is left out: the norm of its gradient is %s", tally.grad_norm)
                self._optimiser.free()
                tally.num_skipped += 1
        tally.add(batch, sums)

    def _add_gradients(self, batch: GlobalBatch) -> ValueLossStats:
        """Adds up the gradients of this rank's part of the batch."""
        sums = ValueLossStats()
        with torch.enable_grad():
            for loss, stats in self._losses(batch):
                loss.backward()
                self._optimiser.collect()
                sums += stats
        return sums

    def _losses(self, batch: GlobalBatch) -> Iterator[tuple[Tensor, ValueLossStats]]:
        """Micro-batch by micro-batch of this rank's part its share of the batch's loss; the graph is to be used before
        the next."""
        clip = self._config.loss_clip_val
        part = collectives.own_part(batch.rows, self._ranks)
        for numbers, values in self.engine.values([batch.rows[i] for i in part]):
            if not numbers:
                # A filler, whose backward the other ranks wait for.
                yield values[0].sum() * 0, ValueLossStats()
                continue
            targets = torch.from_numpy(np.concatenate([batch.targets[part[i]] for i in numbers], axis=1))
            prev_values, returns, mask = targets.to(values[0].device)
            yield clipped_value_loss(torch.cat(values), prev_values, returns, mask, clip, batch.sum_mask)

    def _report(self, request: TrainRequest, tally: _Tally) -> TrainReport:
        return TrainReport(
            id=request.id,
            step=self._optimiser.step,
            weights_version=self.weights_version,
            loss=_mean_loss(tally.sums),
            losses=tally.losses,
            num_tokens=tally.num_tokens,
            clip_fraction=tally.sums.clip_fraction,
            explained_variance=tally.sums.explained_variance,
            grad_norm=tally.grad_norm,
            learning_rate=tally.learning_rate,
            num_steps=tally.num_steps,
            num_skipped=tally.num_skipped,
        )

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs into an existing, empty folder, every file fsynced; raises StorageFailed.

        Every rank must call it, with the same folder; what is written does not tell how many there were.
        """
        self._check_whole()
        facts = {"lineage": self._lineage, "history": self._history, "weights_version": self.weights_version}
        self._state().write(folder, self._files, facts)

    def load(self, folder: Path, lineage: int | None = None) -> None:
        """Becomes what was saved, bitwise, on whichever device the weights are.

        `lineage` is a number that no load had before, by which all later versions differ from those that other
        training from this checkpoint gave; None goes on under the saved one. Raises CheckpointError, with nothing
        changed on any rank, where the folder is damaged or was made with another model or other settings.
        """
        facts, restore = collectives.together(self._ranks, lambda: self._state().open(folder))
        with self._changing("a checkpoint was read only in part"):
            collectives.together(self._ranks, restore)
            self._history = facts["history"]
            self._lineage = facts["lineage"] if lineage is None else lineage

    def _state(self) -> TrainerState:
        return TrainerState(
            self._stored_weights(),
            self._optimiser,
            self.engine.device,
            self._made_with(),
            _OTHERS,
            "checkpoint_dir",
            self._ranks,
            earlier={"base": self._loaded.info.sampled_version},
        )

    def _stored_weights(self) -> dict[str, dict[str, Tensor]]:
        """The model's own tensors as they go into files: by the file's stem and the name there."""
        if self._config.lora is None:
            return {"model": trainer_checkpoint.model_tensors(self._loaded)}
        trunk = self._loaded.trunk.named_parameters()
        adapted = {name: parameter.data for name, parameter in trunk if lora.is_adapter(name)}
        return {"adapter_model": lora.to_peft(adapted), "value_head": trainer_checkpoint.head_tensors(self._loaded)}

    def _made_with(self) -> dict[str, Any]:
        """What must be the same where a checkpoint is loaded."""
        return {
            "format": FORMAT,
            "base": self._loaded.info.weights_version,
            "mean": self._loaded.head.mean,
            "std": self._loaded.head.std,
            "dtype": dtype_name(self.engine.dtype),
            **trainer_checkpoint.learning_settings(self._config),
        }

    # ---------------------------------------------------------------------------------------- memory, and faults

    def offload(self) -> None:
        """Moves weights and optimiser state to the host's memory; nothing is scored or trained until `onload`."""
        self._is_offloaded = True
        self._optimiser.move(torch.device("cpu"))
        self.engine.offload()

    def onload(self) -> None:
        """Moves them back to the device, all or none, on all ranks or none."""
        try:
            collectives.together(self._ranks, self._bring)
        except Exception:
            self.offload()
            raise
        self._is_offloaded = False

    def _bring(self) -> None:
        self.engine.onload()
        self._optimiser.move(self.engine.device)

    def check_ready(self) -> None:
        """Raises Offloaded, or ServerFault where a fault has spoilt the weights."""
        if self._is_offloaded:
            raise Offloaded(f"{self._config.name} is offloaded: its weights are off the device; call onload first")
        self._check_whole()

    def _check_whole(self) -> None:
        if self._broken:
            raise ServerFault(self._broken)

    @contextlib.contextmanager
    def _changing(self, fault: str) -> Iterator[None]:
        """What breaks off within it leaves weights that nobody asked for: they are not used again."""
        self._broken = f"{fault}, which left the critic's weights spoilt: restart the server, which restores them"
        yield
        self._broken = ""


class _Tally:
    """What a request has come to so far."""

    def __init__(self, learning_rate: float) -> None:
        self.sums = ValueLossStats()
        self.losses: list[float] = []
        self.num_tokens = self.num_steps = self.num_skipped = 0
        self.grad_norm = math.nan
        self.learning_rate = learning_rate

    def add(self, batch: GlobalBatch, sums: ValueLossStats) -> None:
        """Counts one global batch that is over."""
        self.sums += sums
        self.losses.append(_mean_loss(sums))
        self.num_tokens += batch.num_tokens


_OTHERS = {
    "base": "belongs to a critic of another model, weights",
    "mean": "belongs to a critic of another standardisation, mean",
    "std": "belongs to a critic of another standardisation, std",
}
"""What a fact that differs says of a checkpoint."""


def _decisive(config: CriticConfig) -> dict[str, Any]:
    """The settings that decide, beside what is learnt from, which weights come out."""
    return {name: getattr(config, name) for name in (*LEARNING, "loss_clip_val")}


def _digest(before: str, *arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(before.encode(), digest_size=16)
    for array in arrays:
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _mean_loss(sums: ValueLossStats) -> float:
    return sums.sum_loss / max(sums.sum_mask, 1.0)
