"""The policy that learns: log-probs of responses and of the reference, optimiser steps, and checkpoints.

Legend: B rows, b rows of a micro-batch, R tokens of the longest response.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.language_models import LoadedPolicy, load_policy
from guerdon.engine.checkpoint.placement import dtype_name, gpu_bytes
from guerdon.engine.layers import recompute_activations
from guerdon.engine.logprobs import LanguageEngine
from guerdon.settings.config import LearningConfig
from guerdon.training import collectives, lora, trainer_checkpoint
from guerdon.training.algorithms.losses import PolicyLossStats
from guerdon.training.optimiser import Optimiser, check_layout
from guerdon.training.trainer_checkpoint import TrainableWeights, TrainerCheckpoint

FORMAT = 1
log = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor | None, np.ndarray], tuple[Tensor, PolicyLossStats]]
"""Maps a micro-batch's log-probs, entropies (or None) and row indices to its share of the loss, and its sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probs of B responses: float32 `[B,R]` on the CPU, without gradients.

    Entry r of a row is about the response's token r, and 0 after the response; `entropies` only if requested.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one optimiser step.

    `stats` are sums over the global batch, before the step; `grad_norm` is the norm before clipping, `learning_rate`
    that of the step. `skipped` means that nothing was changed, because the mask was 0 or the norm not finite.
    `num_micro_batches` counts those of all ranks.
    """

    stats: PolicyLossStats
    grad_norm: float
    learning_rate: float
    skipped: bool
    num_micro_batches: int


class PolicyTrainer(TrainableWeights):
    """A causal language model with its optimiser, and the reference for its KL penalty.

    Its weights are a function of the initial checkpoint, the seed and the steps since; bitwise on a CPU. The reference
    is the model as loaded: with adapters the same model with adapters off, else a frozen copy.

    With several ranks all of them get all rows, and each computes its part of them. If any rank fails, all raise the
    same. If a step or a load fails while it changes the weights, every later use raises ServerFault until a load
    succeeds.
    """

    _corrupt = "which left the policy's weights corrupt: load a checkpoint"

    def __init__(
        self,
        loaded: LoadedPolicy,
        config: LearningConfig,
        *,
        keeps_reference: bool = True,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        """Raises ConfigError if a setting needs a missing library, or does not fit the model or the ranks.

        `seed` draws the initial adapters, if any; `ranks` are those that loaded the policy.
        """
        check_layout(config, ranks)
        self._config = config
        self._ranks = ranks
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.keeps_reference = keeps_reference
        settings = {"architectures": [type(self.model).__name__]}
        self._files = trainer_checkpoint.model_files(loaded.origin, self.model.dtype, settings)
        if config.lora is not None:
            note = lora.add_adapters(self.model, config, loaded, seed, "CAUSAL_LM")
            # With a config.json the folder of an adapter would pass for a whole model's.
            del self._files["config.json"]
            self._files["adapter_config.json"] = trainer_checkpoint.to_json(note)
        if config.activation_checkpointing:
            recompute_activations(loaded.trunk)
        self.engine = LanguageEngine(dataclasses.replace(loaded, trains=True))
        parameters = dict(self.model.named_parameters())
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        prefix = next(name for name, child in self.model.named_children() if child is loaded.trunk)
        summed = frozenset(f"{prefix}.{name}" for name in loaded.summed_over_tensor_ranks)
        self._optimiser = Optimiser(self._trained, config, ranks, summed)
        self._sums, self._num_micro_batches = PolicyLossStats(), 0
        self._reference = self._load_reference() if keeps_reference and config.lora is None else None
        counts = [sum(p.numel() for p in some.values()) for some in (self._trained, parameters)]
        log.info("%s: %s of %s parameters are trained", loaded.config.model, *(f"{count:,}" for count in counts))

    # ---------------------------------------------------------------------------------------- information

    @property
    def step_count(self) -> int:
        """Optimiser steps made, without skipped ones."""
        return self._optimiser.step

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._optimiser.learning_rate

    @property
    def weights_version(self) -> str:
        """`<as loaded>+<optimiser steps since>`."""
        version = self.loaded.info.weights_version
        return f"{version}+{self.step_count}" if self.step_count else version

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` after every layer of policy and reference; returns False if a model has no visible layers."""
        engines = [self.engine] if self._reference is None else [self.engine, self._reference]
        watched = [engine.watch(tick) for engine in engines]
        return all(watched)

    # ---------------------------------------------------------------------------------------- log-probs

    def logprobs(
        self, rows: list[np.ndarray], prompt_lengths: np.ndarray, temperature: float = 1.0, with_entropies: bool = False
    ) -> Logprobs:
        """Returns the log-probs of the rows' responses at this temperature, with their entropies if requested.

        Rows are int64 `[P+R_i]`, prompt and response; `prompt_lengths` is int64 `[B]`. Raises ValueError if a prompt is
        empty.
        """
        self._check_whole()
        return self._all_logprobs(self.engine, rows, prompt_lengths, temperature, with_entropies)

    def reference_logprobs(
        self, rows: list[np.ndarray], prompt_lengths: np.ndarray, temperature: float = 1.0
    ) -> Tensor:
        """Returns the log-probs of the reference, which are those of the policy before its first step."""
        assert self.keeps_reference
        if self._reference is None:
            with lora.without_adapters(self.model):
                return self._all_logprobs(self.engine, rows, prompt_lengths, temperature, False).logprobs
        return self._all_logprobs(self._reference, rows, prompt_lengths, temperature, False).logprobs

    def _all_logprobs(
        self,
        engine: LanguageEngine,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float,
        with_entropies: bool,
    ) -> Logprobs:
        """Collective; returns the results of all ranks in the order of the rows, on the CPU."""
        with engine.no_gradients():
            tables = [torch.zeros(len(rows), _width(rows, prompt_lengths)) for _ in range(1 + with_entropies)]
            with collectives.share_errors(self._ranks):
                micro_batches = self._own_micro_batches(engine, rows, prompt_lengths, temperature, with_entropies)
                for members, *parts in micro_batches:
                    for table, part in zip(tables, parts, strict=False):
                        if len(members):
                            assert part is not None
                            table[members] = part.cpu()
            for table in tables:
                collectives.sum_tables(table, self._ranks)
        return Logprobs(*tables)

    def _own_micro_batches(
        self,
        engine: LanguageEngine,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float,
        with_entropies: bool,
    ) -> Iterator[tuple[np.ndarray, Tensor, Tensor | None]]:
        """Yields row indices, log-probs and entropies of this rank's micro-batches, in tables as wide as for all rows.

        One without indices is a filler: the other ranks wait in its backward pass.
        """
        part = np.array(collectives.rows_of_this_rank(rows, self._ranks), dtype=np.int64)
        if not len(part) and not self._ranks.in_step:
            return
        width = _width(rows, prompt_lengths)
        own, starts = [rows[i] for i in part], prompt_lengths[part]
        for members, *tables in engine.logprobs(own, starts, temperature, with_entropies=with_entropies):
            wide = [None if x is None or x.shape[1] == width else pad(x, (0, width - x.shape[1])) for x in tables]
            logprobs, entropies = (x if y is None else y for x, y in zip(tables, wide, strict=True))
            assert logprobs is not None
            yield part[members], logprobs, entropies

    def _load_reference(self) -> LanguageEngine:
        """Loads the initial model once more; into host memory if the device has no memory for it."""
        own_bytes = sum(collectives.local_shard(p).numel() * p.element_size() for p in self.model.parameters())
        device = self.engine.device
        has_room = device.type != "cuda" or gpu_bytes(device, 2 * own_bytes) >= 2 * own_bytes
        # All shards of a model must be on the same kind of device: a sharded reference must fit.
        if not has_room and not self._ranks.is_sharded:
            log.warning("the reference is on the CPU, which is slow: %s has no memory for it", device)
            device = torch.device("cpu")
        config = dataclasses.replace(self.loaded.config, require_packed=False)
        config.dtype = dtype_name(self.model.dtype)  # type: ignore[assignment]
        loaded = load_policy(config, device, ranks=self._ranks)
        loaded.model.requires_grad_(False)
        # `trains` chooses the policy's forward; with another one their first log-probs would differ slightly.
        return LanguageEngine(dataclasses.replace(loaded, trains=True))

    # ---------------------------------------------------------------------------------------- learning

    def step(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        loss: Loss,
        *,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> StepReport:
        """Makes one optimiser step on the rows of one global batch: `accumulate`, then `apply`."""
        self.accumulate(rows, prompt_lengths, loss, temperature=temperature, with_entropies=with_entropies)
        return self.apply()

    def accumulate(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        loss: Loss,
        *,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> PolicyLossStats:
        """Accumulates the gradients of one global batch; `loss` is called with each micro-batch.

        It gets float32 `[b,R]` log-probs with the graph attached, entropies of the same shape or None, and their
        indices (int64 `[b]`) among `rows`; R is the longest response of all `rows`. Its shares add up to the batch's
        loss, which is in the returned sums. If anything raises, all gradients are dropped.
        """
        self._check_whole()
        own_sums, own_count = PolicyLossStats(), 0
        try:
            with collectives.share_errors(self._ranks), torch.enable_grad():
                micro_batches = self._own_micro_batches(self.engine, rows, prompt_lengths, temperature, with_entropies)
                for members, logprobs, entropies in micro_batches:
                    if not len(members):
                        (logprobs.sum() * 0).backward()
                        self._optimiser.collect()
                        continue
                    share, stats = loss(logprobs, entropies, members)
                    share.backward()
                    self._optimiser.collect()
                    own_sums += stats
                    own_count += 1
            sums = collectives.sum_over_parts(own_sums, self._ranks)
            count = round(float(self._ranks.total([float(own_count)])[0]))
        except BaseException:
            self._reset_gradients()
            self.engine.reset_after_error()
            raise
        self._sums, self._num_micro_batches = self._sums + sums, self._num_micro_batches + count
        return sums

    def apply(self) -> StepReport:
        """Makes an optimiser step with the gradients accumulated since the last one.

        If the mask is 0 or the gradient's norm is not finite, the step is skipped: it changes nothing, the schedule
        included.
        """
        self._check_whole()
        sums, count = self._sums, self._num_micro_batches
        try:
            self._optimiser.sum_over_ranks()
            norm, rate = self._optimiser.gradient_norm(), self._optimiser.learning_rate
            skipped = not (sums.sum_mask > 0 and math.isfinite(norm))
            if skipped:
                log.warning("skipped a step: the mask sums to %g, the gradient's norm is %g", sums.sum_mask, norm)
            else:
                fault = "a step broke off inside the optimiser"
                with self._changing_weights(fault), collectives.share_errors(self._ranks):
                    self._optimiser.apply(norm)
        finally:
            self._reset_gradients()
        return StepReport(sums, norm, rate, skipped, count)

    def _reset_gradients(self) -> None:
        self._optimiser.free()
        self._sums, self._num_micro_batches = PolicyLossStats(), 0

    def offload_optimizer(self) -> None:
        """Moves the optimiser's state to host memory; no step may be made until `onload_optimizer`."""
        self._optimiser.move(torch.device("cpu"))
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload_optimizer(self) -> None:
        """Moves the optimiser's state back to the device."""
        self._optimiser.move(self.engine.device)

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Collective; writes everything that `load` needs into an existing, empty folder, fsynced. Raises
        StorageFailed.

        `AutoModelForCausalLM.from_pretrained` reads the policy from it, too. All ranks must pass the same folder; the
        files do not depend on the number of ranks.
        """
        self._check_whole()
        self._checkpoint().write(folder, self._files, {"weights_version": self.weights_version})

    def load(self, folder: Path) -> None:
        """Collective; restores a checkpoint bitwise.

        Raises CheckpointError, with nothing changed on any rank, if that is impossible.
        """
        with collectives.share_errors(self._ranks):
            _, restore = self._checkpoint().open(folder)
        self._reset_gradients()
        fault = "a checkpoint was read only in part"
        with self._changing_weights(fault), collectives.share_errors(self._ranks):
            restore()

    def _checkpoint(self) -> TrainerCheckpoint:
        must_match = {
            "format": FORMAT,
            "base": self.loaded.info.weights_version,
            "dtype": dtype_name(self.model.dtype),
            **trainer_checkpoint.learning_settings(self._config),
        }
        mismatches = {"base": "belongs to a policy that began from another model, weights"}
        return TrainerCheckpoint(
            self._stored_weights(),
            self._optimiser,
            self.engine.device,
            must_match,
            mismatches,
            "run.output_dir",
            self._ranks,
        )

    def _stored_weights(self) -> dict[str, dict[str, Tensor]]:
        """Returns the model's tensors for its files: by the file's stem and the name in it."""
        if self._config.lora is not None:
            return {"adapter_model": lora.to_peft({name: p.data for name, p in self._trained.items()})}
        tied = self.model.all_tied_weights_keys
        return {"model": {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}}


def _width(rows: list[np.ndarray], prompt_lengths: np.ndarray) -> int:
    """Returns the tokens of the longest response."""
    return max(len(row) - int(start) for row, start in zip(rows, prompt_lengths, strict=True))
