"""A user's own critic and optimiser, as NeMo-Aligner's `CriticServerTrainer` takes them, run as the worker runs one."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guerdon.core import ModelInfo, Score, Sequence
from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.distributed.parts import WHOLE
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.functions import MAX_BATCH_TOKENS, FunctionEncoder, pad_batch
from guerdon.errors import (
    GuerdonError,
    InvalidRequest,
    RanksLost,
    SampleFailed,
    ServerFault,
    TrainFailed,
    Unsupported,
    describe,
)
from guerdon.training.estimates import read_rows, with_estimates
from guerdon.trees import flatten

log = logging.getLogger(__name__)

_REPORTED = ("loss", "clip_fraction", "explained_variance", "value_mean", "return_mean", "grad_norm", "lr")


class UserCritic:
    """Scores and trains with the user's `model`, `optimizer` and `scheduler`.

    `CriticServerTrainer` documents the model's interface. `save_elsewhere()` saves the state outside the server's
    checkpoints. With several ranks all of them get the same requests, and each computes the rows of its part in
    `parts`: the model itself combines gradients and losses of several parts, and rank 0's loss counts. All ranks make a
    step, or none does. Each clips by the norm of its own gradient: a model with sharded weights must clip by itself, at
    the end of `get_loss_and_metrics`.
    """

    max_batch_tokens = MAX_BATCH_TOKENS
    takes_all = True
    ranks: Ranks = ALONE
    parts = WHOLE
    broken = ""
    """Why the state of the weights is unknown; empty if it is known."""

    def __init__(
        self,
        info: ModelInfo,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        logger: Any,
        *,
        encoder: FunctionEncoder,
        save_elsewhere: Callable[[], None],
        global_batch_size: int,
        forward_batch_size: int,
        strip_to_multiple: int,
        gradient_clip_val: float,
    ) -> None:
        self.info = info
        self.encoder = encoder
        self.restart_at(0)
        self._model, self._optimizer, self._scheduler, self._logger = model, optimizer, scheduler, logger
        self._save_elsewhere = save_elsewhere
        self._global_batch_size = global_batch_size
        self._forward_batch_size = forward_batch_size
        self._multiple = strip_to_multiple
        self._largest_norm = gradient_clip_val
        self._is_combined = "rewards" in info.outputs
        self._is_stepping = False

    @torch.no_grad()
    def infer(self, tokens: Any, lengths: Any) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns rewards float32 `[B]` (None without a reward model) and values `[B,T]` of padded `tokens` `[B,T]`."""
        device = self._device()
        inputs = (
            torch.as_tensor(_writable(tokens), dtype=torch.long, device=device),
            torch.as_tensor(_writable(lengths), dtype=torch.long, device=device).reshape(-1),
        )
        with self.calling_hooks("prepare_for_inference", "finish_inference"):
            if not self._is_combined:
                return None, _numpy(self._model.infer(inputs=inputs))
            rewards, values = self._model.infer_rm_critic(inputs=inputs)
        return _numpy(rewards).reshape(len(inputs[0])), _numpy(values)

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: the user's model does not show its layers."""
        return False

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Returns one result per sequence, in order."""
        tokens, lengths = pad_batch(sequences, self._forward_batch_size, self._multiple, self.parts.count)
        rows = self.parts.slice(len(tokens))
        all_rewards, all_values = zip(*self.parts.gather(lambda: self.infer(tokens[rows], lengths[rows])), strict=True)
        rewards, values = np.concatenate(all_rewards) if self._is_combined else None, np.concatenate(all_values)
        if values.shape != tuple(tokens.shape):
            raise ValueError(f"the critic returned values {list(values.shape)} for tokens {list(tokens.shape)}")
        results: list[Score | SampleFailed] = []
        for i, s in enumerate(sequences):
            own = values[i, : len(s.tokens)]
            reward = 0.0 if rewards is None else float(rewards[i])
            if not (np.isfinite(own).all() and math.isfinite(reward)):
                results.append(SampleFailed("the critic gave no finite number for this sample"))
            else:
                results.append(Score(reward, values=own))
        return results

    def train(self, request: TrainRequest, first_batches: int | None = None) -> TrainReport:
        """Makes an optimiser step per global batch in each of `request.updates` passes, or for the `first_batches`.

        The last global batch is filled up with rows of mask 0, shared by all parts; a part may have no other rows. A
        global batch without any masked token makes no step. Raises TrainFailed if the user's code raises; ServerFault
        if it raises on some ranks only, or not at the same step: then the ranks' weights differ, and `broken` says so.
        """
        if self.broken:
            raise ServerFault(self.broken)
        try:
            report = self._train(request, first_batches)
        except RanksLost:
            raise
        except BaseException as e:
            if not self.broken:
                self._agree(request.id, e)
            raise
        self._agree(request.id)
        return report

    def _train(self, request: TrainRequest, first_batches: int | None) -> TrainReport:
        done: list[tuple[dict[str, Any], float, int]] = []
        num_kept, step = 0, self.step
        self._is_stepping = False
        try:
            with self.calling_hooks("prepare_for_training", "finish_training"):
                passes = itertools.chain.from_iterable(self._global_batches(request) for _ in range(request.updates))
                for batch in itertools.islice(passes, first_batches):
                    if num_tokens := int((batch["mask"] > 0).sum()):
                        metrics = self._train_step(request.id, self._rows_of_this_part(batch))
                        done.append((metrics, float(batch["mask"].sum()), num_tokens))
                    num_kept, step = num_kept + 1, self.step
        except Exception as e:
            if self.broken or isinstance(e, RanksLost):
                raise
            num_kept += self.step > step  # raised after the step itself
            kept = f"its first {num_kept} global batches are kept" if num_kept else "nothing was changed"
            if self._is_stepping:
                kept = f"the optimiser failed within step {self.step + 1}, which may be applied in part"
                self.restart_at(self.step)
            raise TrainFailed(f"training failed: {describe(e)}; {kept}", num_kept) from e
        finally:
            self._optimizer.zero_grad()
        return self._report(request.id, done, request.updates)

    def _agree(self, name: str, error: BaseException | None = None, norm: float = 0.0) -> float:
        """Collective; returns the norm of this rank's gradient, or another rank's that is not finite.

        Raises ServerFault on all ranks if they are at different steps, or if an `error` is not on all of them.
        """
        if self.ranks.size == 1:
            return norm
        # The only collective here, so that ranks at different steps still exchange their errors.
        all_states = self.ranks.tell_all((self.step, norm) if error is None else self.ranks.portable(error))
        errors = [e for e in all_states if isinstance(e, GuerdonError)]
        states = {(type(e), getattr(e, "num_steps", None)) if isinstance(e, GuerdonError) else e[0] for e in all_states}
        if len(states) > 1:
            why = "; ".join(map(str, errors)) or f"they are at steps {', '.join(str(step) for step, _ in all_states)}"
            self.broken = f"the ranks disagree on train request {name}, and must be restarted: {why}"
            raise ServerFault(self.broken) from error
        return norm if errors else next((other for _, other in all_states if not math.isfinite(other)), norm)

    def validate(self, request: TrainRequest) -> TrainReport:
        """Returns the request's loss by `get_loss_and_metrics(batch, forward_only=True)`; changes nothing."""
        done: list[tuple[dict[str, Any], float, int]] = []
        with self.calling_hooks("prepare_for_training", "finish_training"), torch.no_grad():
            for batch in self._global_batches(request):
                if num_tokens := int((batch["mask"] > 0).sum()):
                    loss, metrics = self._model.get_loss_and_metrics(self._rows_of_this_part(batch), forward_only=True)
                    logged = _plain_metrics(metrics | {"loss": loss})
                    done.append((logged, float(batch["mask"].sum()), num_tokens))
        return dataclasses.replace(self._report(request.id, done), num_steps=0, num_skipped=0)

    def estimate(self, request: TrainRequest) -> TrainRequest:
        """Returns the request with estimates from its rewards and the current values, as `with_estimates`."""
        rows = read_rows(request.tokens, request.mask, 1)
        table = np.zeros_like(request.mask)
        for (i, row), score in zip(rows.items(), self.score([Sequence(row) for row in rows.values()]), strict=True):
            if isinstance(score, SampleFailed):
                raise TrainFailed(f"row {i}: {score}: nothing was changed", 0)
            table[i, : len(row) - 1] = score.values[:-1]  # type: ignore[index]
        return with_estimates(request, table)

    def save(self, folder: Path) -> None:
        """Saves where the user saves, on every rank; writes nothing into `folder`."""
        self._save_elsewhere()

    def load(self, folder: Path, lineage: int | None = None) -> None:
        raise Unsupported("this server runs a user's critic, and cannot load its checkpoints")

    def offload(self) -> None:
        raise Unsupported("this server runs a user's critic, and cannot move its weights")

    onload = offload

    def state(self) -> dict[str, Any]:
        """Returns the step, the learning rate, the numbers of parameters, and the fault if weights are corrupt."""
        parameters = list(self._model.parameters())
        return {
            "step": self.step,
            "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "broken": self.broken,
        }

    def restart_at(self, step: int) -> None:
        """Continues counting at `step` with unknown weights, under versions that were never used."""
        self.run_token = uuid.uuid4().hex[:8]
        self._set_step(step)

    def _set_step(self, step: int) -> None:
        self.step = step
        version = f"1+{step}" if step else "1"
        self.info = dataclasses.replace(self.info, weights_version=f"{version}-run{self.run_token}")

    @contextmanager
    def calling_hooks(self, before: str, after: str) -> Iterator[None]:
        """Calls the model's hooks of those names, if it has them."""
        getattr(self._model, before, lambda: None)()
        try:
            yield
        finally:
            getattr(self._model, after, lambda: None)()

    def _train_step(self, name: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Makes one optimiser step unless a rank's gradient is not finite; returns the logged metrics."""
        self._optimizer.zero_grad()
        started = time.monotonic()
        with self.calling_hooks("prepare_for_training_step", "finish_training_step"):
            loss, metrics = self._model.get_loss_and_metrics(batch, forward_only=False)
        step_time = time.monotonic() - started
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._largest_norm))
        more = {"grad_norm": grad_norm, "lr": self._optimizer.param_groups[0]["lr"], "step_time": step_time}
        metrics = _plain_metrics(metrics | {"loss": loss, **more})
        metrics["grad_norm"] = self._agree(name, norm=grad_norm)
        if math.isfinite(metrics["grad_norm"]):
            self._is_stepping = True
            self._optimizer.step()
            self._is_stepping = False
            self._set_step(self.step + 1)
            self._scheduler.step()
            self._logger.log_metrics(metrics, step=self.step - 1, prefix="train/")
        else:
            log.warning("the gradient after step %d is not finite: skipped its global batch", self.step)
        return metrics

    def _global_batches(self, request: TrainRequest) -> Iterator[dict[str, torch.Tensor]]:
        """Yields dicts of `global_batch_size` rows on the model's device, zero where the mask is 0.

        Trees are sent path by path, and may be cut between two batches.
        """
        request, _ = flatten(request)
        is_read = request.mask > 0
        last = np.where(is_read.any(1), is_read.shape[1] - is_read[:, ::-1].argmax(1), -1)
        behind = np.arange(request.tokens.shape[1])[None] > last[:, None]
        arrays = {
            "tokens": np.where(behind, 0, request.tokens),
            "returns": np.where(is_read, request.returns, np.float32(0)),
            "prev_values": np.where(is_read, request.prev_values, np.float32(0)),
            "mask": np.where(is_read, request.mask, np.float32(0)),
        }
        for start in range(0, len(request), self._global_batch_size):
            rows = min(self._global_batch_size, len(request) - start)
            fill = ((0, self._global_batch_size - rows), (0, 0))
            yield {
                name: torch.from_numpy(np.pad(x[start : start + rows], fill)).to(self._device())
                for name, x in arrays.items()
            }

    def _rows_of_this_part(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns every n-th row for n parts, so that each part has rows of a filled-up batch."""
        return {name: x[self.parts.index :: self.parts.count] for name, x in batch.items()}

    def _report(self, name: str, done: list[tuple[dict[str, Any], float, int]], updates: int = 1) -> TrainReport:
        """`done` has the metrics, the mask's sum and the number of masked tokens of each global batch of all passes."""
        if not done:
            raise InvalidRequest("the mask is 0 everywhere: nothing to learn from")
        metrics, weights, counts = zip(*done, strict=True)
        losses = [m["loss"] for m in metrics]
        num_skipped = sum(not math.isfinite(m.get("grad_norm", 0.0)) for m in metrics)
        size = -(-len(done) // updates)

        def mean(key: str, start: int = 0) -> float:
            part = slice(start, start + size)
            return float(np.average([m.get(key, math.nan) for m in metrics[part]], weights=weights[part]))

        return TrainReport(
            id=name,
            step=self.step,
            weights_version=self.info.weights_version,
            loss=mean("loss"),
            losses=losses,
            num_tokens=sum(counts),
            clip_fraction=mean("clip_fraction"),
            explained_variance=mean("explained_variance"),
            grad_norm=metrics[-1].get("grad_norm", math.nan),
            learning_rate=metrics[-1].get("lr", math.nan),
            num_steps=len(done) - num_skipped,
            num_skipped=num_skipped,
            pass_losses=[mean("loss", start) for start in range(0, len(done), size)],
            value_mean=mean("value_mean"),
            return_mean=mean("return_mean"),
        )

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _plain_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Converts one-element tensors to numbers, and the report's metrics to floats; raises if that fails."""
    plain = {name: x.detach() if torch.is_tensor(x) else x for name, x in metrics.items()}
    logged = {name: x.item() if torch.is_tensor(x) and x.numel() == 1 else x for name, x in plain.items()}
    return logged | {name: float(logged[name]) for name in _REPORTED if name in logged}


def _writable(x: Any) -> Any:
    """Returns a copy of a read-only array, about which torch would warn; else the array itself."""
    return x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x


def _numpy(x: Any) -> np.ndarray:
    made: np.ndarray = torch.as_tensor(x).detach().float().cpu().numpy()
    return made
