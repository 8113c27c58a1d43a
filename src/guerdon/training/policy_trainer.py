"""The policy that learns: log-probs of responses, those of its reference, one optimiser step, and its checkpoints.

Legend: B rows, b rows of a micro-batch, R tokens of the longest response.
"""

from __future__ import annotations

import contextlib
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
from guerdon.engine.checkpoint.placement import dtype_name, gpu_bytes
from guerdon.engine.checkpoint.policies import LoadedPolicy, load_policy
from guerdon.engine.language import LanguageEngine
from guerdon.engine.recompute import recompute_activations
from guerdon.errors import ServerFault
from guerdon.settings.config import LearningConfig
from guerdon.training import collectives, lora, trainer_checkpoint
from guerdon.training.algorithms.policy_losses import PolicyLossStats
from guerdon.training.optimiser import Optimiser, check_layout
from guerdon.training.trainer_state import TrainerState

FORMAT = 1
log = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor | None, np.ndarray], tuple[Tensor, PolicyLossStats]]
"""Of a micro-batch's log-probs, entropies (or None) and rows' numbers: its share of the loss, and its sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """What a policy makes of B responses: float32 `[B,R]` on the CPU, without gradients.

    Entry r of a row is about the response's token r, and 0 beyond the response; `entropies` only where asked for.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did.

    `stats` are sums over the global batch, before the step; `grad_norm` is that before clipping, `learning_rate` the
    one that the step used. `skipped` tells that nothing was changed: no token counted, or the norm was not finite.
    `num_micro_batches` counts those of all ranks.
    """

    stats: PolicyLossStats
    grad_norm: float
    learning_rate: float
    skipped: bool
    num_micro_batches: int


class PolicyTrainer:
    """A causal language model with its optimiser, and the reference that it is held to.

    Its weights are a function of the checkpoint that it began from, of the seed and of the steps since; on a CPU
    bitwise. The reference is the model as loaded: with adapters itself without them, else a frozen copy.

    Many ranks do it together: all are given all rows, and each computes its part of them. Where any of them fails, all
    raise the same. Once a step or a load has broken off within the weights, whatever uses them raises ServerFault, but
    for a load that succeeds.
    """

    def __init__(
        self,
        loaded: LoadedPolicy,
        config: LearningConfig,
        *,
        keeps_reference: bool = True,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        """Begins with adapters, where there are any, as `seed` has them drawn; `ranks` are those that loaded it.

        Raises ConfigError where a setting needs a library that is not there, or does not fit the model or the ranks.
        """
        check_layout(config, ranks)
        self._config = config
        self._ranks = ranks
        self._broken = ""
        self.policy = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.keeps_reference = keeps_reference
        settings = {"architectures": [type(self.model).__name__]}
        self._files = trainer_checkpoint.model_files(loaded.folder, self.model.dtype, settings)
        if config.lora is not None:
            targets, without = config.lora_targets, loaded.gathering.no_gradients
            lora.add_adapters(self.model, config.lora, config.lora_alpha, targets, seed, without)
            base = str(loaded.folder.resolve()) if Path(loaded.config.model).is_dir() else loaded.config.model
            # Beside an adapter a config.json would pass for a whole model's.
            del self._files["config.json"]
            self._files["adapter_config.json"] = trainer_checkpoint.to_json(lora.describe_adapters(self.model, base))
        if config.activation_checkpointing:
            recompute_activations(loaded.trunk)
        self.engine = LanguageEngine(dataclasses.replace(loaded, trains=True))
        parameters = dict(self.model.named_parameters())
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._optimiser = Optimiser(self._trained, config, ranks, self._summed_over_tensor_ranks())
        self._sums, self._num_micro_batches = PolicyLossStats(), 0
        self._reference = self._load_reference() if keeps_reference and config.lora is None else None
        counts = [sum(p.numel() for p in some.values()) for some in (self._trained, parameters)]
        log.info("%s: %s of %s parameters train", loaded.config.model, *(f"{count:,}" for count in counts))

    # ---------------------------------------------------------------------------------------- what it is

    @property
    def step_count(self) -> int:
        """Optimiser steps made; skipped ones are none."""
        return self._optimiser.step

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        return self._optimiser.learning_rate

    @property
    def weights_version(self) -> str:
        """`<as loaded>+<optimiser steps since>`."""
        version = self.policy.info.weights_version
        return f"{version}+{self.step_count}" if self.step_count else version

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` whenever a layer of the policy or its reference has run; False where they show no layers."""
        engines = [self.engine] if self._reference is None else [self.engine, self._reference]
        watched = [engine.watch(tick) for engine in engines]
        return all(watched)

    def _summed_over_tensor_ranks(self) -> frozenset[str]:
        """The parameters whose gradients must be summed over the ranks of tensor parallelism, by the model's names."""
        prefix = next(name for name, child in self.model.named_children() if child is self.policy.trunk)
        return frozenset(f"{prefix}.{name}" for name in self.policy.summed_over_tensor_ranks)

    # ---------------------------------------------------------------------------------------- log-probs

    def logprobs(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> Logprobs:
        """Log-probs of the rows' responses at this temperature, where asked for with their entropies.

        Rows are int64 `[P+R_i]`, prompt and response; `prompt_lengths` is int64 `[B]`. Raises ValueError where a prompt
        is empty.
        """
        self._check_whole()
        return self._gathered(self.engine, rows, prompt_lengths, temperature, with_entropies)

    def reference_logprobs(
        self, rows: list[np.ndarray], prompt_lengths: np.ndarray, temperature: float = 1.0
    ) -> Tensor:
        """What the log-probs of `logprobs` were before the first step."""
        assert self.keeps_reference
        if self._reference is None:
            with lora.without_adapters(self.model):
                return self._gathered(self.engine, rows, prompt_lengths, temperature, False).logprobs
        return self._gathered(self._reference, rows, prompt_lengths, temperature, False).logprobs

    def _gathered(
        self,
        engine: LanguageEngine,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float,
        with_entropies: bool,
    ) -> Logprobs:
        """The micro-batches' results of all ranks in the order of the rows, on the CPU."""
        with engine.no_gradients():
            made = [torch.zeros(len(rows), _width(rows, prompt_lengths)) for _ in range(1 + with_entropies)]

            def fill() -> None:
                for members, *parts in self._of_own_rows(engine, rows, prompt_lengths, temperature, with_entropies):
                    for whole, part in zip(made, parts, strict=False):
                        if len(members):
                            assert part is not None
                            whole[members] = part.cpu()

            collectives.together(self._ranks, fill)
            for whole in made:
                collectives.add_up(whole, self._ranks)
        return Logprobs(*made)

    def _of_own_rows(
        self,
        engine: LanguageEngine,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float,
        with_entropies: bool,
    ) -> Iterator[tuple[np.ndarray, Tensor, Tensor | None]]:
        """What the engine gives for this rank's part of the rows: their numbers, and tables as wide as for all rows.

        Without numbers it is a filler, whose backward the other ranks wait for.
        """
        part = np.array(collectives.own_part(rows, self._ranks), dtype=np.int64)
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
        """The model as loaded, once more; in the host's memory where the device has no room for it."""
        own_bytes = sum(collectives.local(p).numel() * p.element_size() for p in self.model.parameters())
        device = self.engine.device
        has_room = device.type != "cuda" or gpu_bytes(device, 2 * own_bytes) >= 2 * own_bytes
        # Parts of one model cannot be on the CPU here and on a GPU there: sharded, it must fit.
        if not has_room and not self._ranks.is_sharded:
            log.warning("the reference stays on the CPU: %s has no room for it, and it will be slow there", device)
            device = torch.device("cpu")
        config = dataclasses.replace(self.policy.config, require_packed=False)
        config.dtype = dtype_name(self.model.dtype)  # type: ignore[assignment]
        loaded = load_policy(config, device, ranks=self._ranks)
        loaded.model.requires_grad_(False)
        # Chosen as the policy's path is, by gradients, too: by another one their first log-probs would differ a little.
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
        """One optimiser step on the rows of one global batch: `accumulate`, then `apply`."""
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
        """Adds up the gradients of one global batch; `loss` is asked for the share of each micro-batch.

        It gets float32 `[b,R]` log-probs with the graph attached, entropies of the same shape or None, and the numbers
        (int64 `[b]`) that these have among `rows`; R is the longest response among all of `rows`. The shares add up to
        the batch's loss, which is in the sums that are returned. Where anything is raised, no gradients are left.
        """
        self._check_whole()
        own, own_count = PolicyLossStats(), 0

        def add_gradients() -> None:
            nonlocal own, own_count
            with torch.enable_grad():
                for members, logprobs, entropies in self._of_own_rows(
                    self.engine, rows, prompt_lengths, temperature, with_entropies
                ):
                    if not len(members):
                        (logprobs.sum() * 0).backward()
                        self._optimiser.collect()
                        continue
                    share, stats = loss(logprobs, entropies, members)
                    share.backward()
                    self._optimiser.collect()
                    own += stats
                    own_count += 1

        try:
            collectives.together(self._ranks, add_gradients)
            sums = collectives.sum_over_parts(own, self._ranks)
            count = round(float(self._ranks.total([float(own_count)])[0]))
        except BaseException:
            self._drop()
            self.engine.forget_broken()
            raise
        self._sums, self._num_micro_batches = self._sums + sums, self._num_micro_batches + count
        return sums

    def apply(self) -> StepReport:
        """The optimiser step of the gradients added up since the last one.

        Where no token counts or the gradient's norm is not finite, nothing is changed, the schedule included.
        """
        self._check_whole()
        sums, count = self._sums, self._num_micro_batches
        try:
            self._optimiser.sum_over_ranks()
            norm, rate = self._optimiser.gradient_norm(), self._optimiser.learning_rate
            skipped = not (sums.sum_mask > 0 and math.isfinite(norm))
            if skipped:
                log.warning("a step is left out: %g tokens count, the gradient's norm is %g", sums.sum_mask, norm)
            else:
                with self._changing("a step broke off inside the optimiser"):
                    collectives.together(self._ranks, lambda: self._optimiser.apply(norm))
        finally:
            self._drop()
        return StepReport(sums, norm, rate, skipped, count)

    def _check_whole(self) -> None:
        if self._broken:
            raise ServerFault(self._broken)

    @contextlib.contextmanager
    def _changing(self, fault: str) -> Iterator[None]:
        """What breaks off within it leaves weights that nobody asked for: they are not used again."""
        self._broken = f"{fault}, which left the policy's weights spoilt: load a checkpoint"
        yield
        self._broken = ""

    def _drop(self) -> None:
        """Begins a step with no gradients."""
        self._optimiser.free()
        self._sums, self._num_micro_batches = PolicyLossStats(), 0

    def offload_optimizer(self) -> None:
        """Moves the optimiser's state to the host's memory; no step may be made until `onload_optimizer`."""
        self._optimiser.move(torch.device("cpu"))
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload_optimizer(self) -> None:
        """Moves it back to the device."""
        self._optimiser.move(self.engine.device)

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Writes all that `load` needs into an existing, empty folder, every file fsynced; raises StorageFailed.

        `AutoModelForCausalLM.from_pretrained` reads the policy from it, too. Every rank must call it, with the same
        folder; what is written does not tell how many there were.
        """
        self._check_whole()
        self._state().write(folder, self._files, {"weights_version": self.weights_version})

    def load(self, folder: Path) -> None:
        """Becomes what was saved, bitwise; raises CheckpointError, with nothing changed on any rank, where that cannot
        be."""
        _, restore = collectives.together(self._ranks, lambda: self._state().open(folder))
        self._drop()
        with self._changing("a checkpoint was read only in part"):
            collectives.together(self._ranks, restore)

    def _state(self) -> TrainerState:
        made_with = {
            "format": FORMAT,
            "base": self.policy.info.weights_version,
            "dtype": dtype_name(self.model.dtype),
            **trainer_checkpoint.learning_settings(self._config),
        }
        others = {"base": "belongs to a policy that began from another model, weights"}
        return TrainerState(
            self._stored_weights(),
            self._optimiser,
            self.engine.device,
            made_with,
            others,
            "run.output_dir",
            self._ranks,
            earlier={"base": self.policy.info.sampled_version},
        )

    def _stored_weights(self) -> dict[str, dict[str, Tensor]]:
        """The model's own tensors as they go into files: by the file's stem and the name there."""
        if self._config.lora is not None:
            return {"adapter_model": lora.to_peft({name: p.data for name, p in self._trained.items()})}
        tied = self.model.all_tied_weights_keys
        return {"model": {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}}


def _width(rows: list[np.ndarray], prompt_lengths: np.ndarray) -> int:
    """Tokens of the longest response."""
    return max(len(row) - int(start) for row, start in zip(rows, prompt_lengths, strict=True))
