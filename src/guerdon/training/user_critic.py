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
from guerdon.errors import GuerdonError, InvalidRequest, RanksLost, SampleFailed, ServerFault, TrainFailed, Unsupported

log = logging.getLogger(__name__)

_REPORTED = ("loss", "clip_fraction", "explained_variance", "grad_norm", "lr")


class UserCritic:
    """Scores and trains with `model`, `optimizer` and `scheduler`, which know nothing of guerdon.

    What `model` must have is said at `CriticServerTrainer`. `save_elsewhere()` saves what the server does not keep.
    Of many ranks each is given the same requests, and computes the rows of `parts`: how gradients and losses of several
    parts become one, the model knows, and rank 0's loss counts. All ranks make a step, or none does. Each clips by the
    norm of its own gradient: a model whose weights are sharded clips by itself, at the end of `get_loss_and_metrics`.
    """

    max_batch_tokens = MAX_BATCH_TOKENS
    takes_all = True
    ranks: Ranks = ALONE
    parts = WHOLE
    broken = ""
    """Why nobody knows any more what the weights are."""

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
        self.begin(0)
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
        """Rewards float32 `[B]` (None without a reward model) and values `[B,T]` of padded `tokens` `[B,T]`."""
        device = self._device()
        inputs = (
            torch.as_tensor(_writable(tokens), dtype=torch.long, device=device),
            torch.as_tensor(_writable(lengths), dtype=torch.long, device=device).reshape(-1),
        )
        with self.between("prepare_for_inference", "finish_inference"):
            if not self._is_combined:
                return None, _numpy(self._model.infer(inputs=inputs))
            rewards, values = self._model.infer_rm_critic(inputs=inputs)
        return _numpy(rewards).reshape(len(inputs[0])), _numpy(values)

    def watch(self, tick: Callable[..., None]) -> bool:
        """False: how far the user's model has got is not known."""
        return False

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """One result a sequence, in order."""
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

    def train(self, request: TrainRequest, first_steps: int | None = None) -> TrainReport:
        """One optimiser step a global batch, only the first so many of them where asked.

        The last global batch is filled up with rows of mask 0, which all parts share; a part has no other row if there
        are fewer rows than parts. A global batch without any masked token makes no step. Raises
        TrainFailed where the model, or another part of the user's, raises; ServerFault where it does on some ranks
        only, or not at the same step: then the ranks' weights differ, and `broken` says so.
        """
        if self.broken:
            raise ServerFault(self.broken)
        try:
            report = self._train(request, first_steps)
        except RanksLost:
            raise
        except BaseException as e:
            if not self.broken:
                self._tell(request.id, e)
            raise
        self._tell(request.id)
        return report

    def _train(self, request: TrainRequest, first_steps: int | None) -> TrainReport:
        done: list[tuple[dict[str, Any], float, int]] = []
        num_stand, step = 0, self.step
        self._is_stepping = False
        try:
            with self.between("prepare_for_training", "finish_training"):
                for batch in itertools.islice(self._global_batches(request), first_steps):
                    if num_tokens := int((batch["mask"] > 0).sum()):
                        metrics = self._train_step(request.id, self._own(batch))
                        done.append((metrics, float(batch["mask"].sum()), num_tokens))
                    num_stand, step = num_stand + 1, self.step
        except Exception as e:
            if self.broken or isinstance(e, RanksLost):
                raise
            num_stand += self.step > step  # what raised came behind the step itself
            stand = f"its first {num_stand} global batches stand" if num_stand else "nothing was changed"
            if self._is_stepping:
                stand = f"the optimiser broke off inside step {self.step + 1}, which may stand in part"
                self.begin(self.step)
            raise TrainFailed(f"training failed: {type(e).__name__}: {e}; {stand}", num_stand) from e
        finally:
            self._optimizer.zero_grad()
        return self._report(request.id, done)

    def _tell(self, name: str, error: BaseException | None = None, norm: float = 0.0) -> float:
        """The norm of this rank's gradient, or one of another's that is not finite, once all have come equally far.

        Raises ServerFault, on all of them, where they have not, or an `error` is not everybody's.
        """
        if self.ranks.size == 1:
            return norm
        # Always from here: what one rank has failed with the others hear of wherever they are.
        told = self.ranks.tell_all((self.step, norm) if error is None else self.ranks.portable(error))
        errors = [e for e in told if isinstance(e, GuerdonError)]
        came_to = {(type(e), getattr(e, "num_steps", None)) if isinstance(e, GuerdonError) else e[0] for e in told}
        if len(came_to) > 1:
            why = "; ".join(map(str, errors)) or f"they are at steps {', '.join(str(step) for step, _ in told)}"
            self.broken = f"the ranks came to train request {name} differently, and must be restarted: {why}"
            raise ServerFault(self.broken) from error
        return norm if errors else next((other for _, other in told if not math.isfinite(other)), norm)

    def validate(self, request: TrainRequest) -> TrainReport:
        """The loss of the request as `get_loss_and_metrics(batch, forward_only=True)` tells it; nothing changes."""
        done: list[tuple[dict[str, Any], float, int]] = []
        with self.between("prepare_for_training", "finish_training"), torch.no_grad():
            for batch in self._global_batches(request):
                if num_tokens := int((batch["mask"] > 0).sum()):
                    loss, metrics = self._model.get_loss_and_metrics(self._own(batch), forward_only=True)
                    told = _told(metrics | {"loss": loss})
                    done.append((told, float(batch["mask"].sum()), num_tokens))
        return dataclasses.replace(self._report(request.id, done), num_steps=0, num_skipped=0)

    def save(self, folder: Path) -> None:
        """Saves where the user saves, on every rank; nothing is written into `folder`."""
        self._save_elsewhere()

    def load(self, folder: Path, lineage: int | None = None) -> None:
        raise Unsupported("this server runs a user's own critic, and loads no checkpoint for it")

    def offload(self) -> None:
        raise Unsupported("this server runs a user's own critic, and does not move its weights")

    onload = offload

    def state(self) -> dict[str, Any]:
        """Step, learning rate, and how many parameters there are and train, and what has spoilt them."""
        parameters = list(self._model.parameters())
        return {
            "step": self.step,
            "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "broken": self.broken,
        }

    def begin(self, step: int) -> None:
        """Goes on counting from `step`, with weights of which nothing is known: under versions that no other had."""
        self.run_token = uuid.uuid4().hex[:8]
        self._count(step)

    def _count(self, step: int) -> None:
        self.step = step
        version = f"1+{step}" if step else "1"
        self.info = dataclasses.replace(self.info, weights_version=f"{version}-run{self.run_token}")

    @contextmanager
    def between(self, before: str, after: str) -> Iterator[None]:
        """Calls the model's hooks of those names, where it has them."""
        getattr(self._model, before, _nothing)()
        try:
            yield
        finally:
            getattr(self._model, after, _nothing)()

    def _train_step(self, name: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One optimiser step, unless the gradient of a rank is not finite; the metrics that were logged."""
        self._optimizer.zero_grad()
        started = time.monotonic()
        with self.between("prepare_for_training_step", "finish_training_step"):
            loss, metrics = self._model.get_loss_and_metrics(batch, forward_only=False)
        step_time = time.monotonic() - started
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._largest_norm))
        more = {"grad_norm": grad_norm, "lr": self._optimizer.param_groups[0]["lr"], "step_time": step_time}
        metrics = _told(metrics | {"loss": loss, **more})
        metrics["grad_norm"] = self._tell(name, norm=grad_norm)
        if math.isfinite(metrics["grad_norm"]):
            self._is_stepping = True
            self._optimizer.step()
            self._is_stepping = False
            self._count(self.step + 1)
            self._scheduler.step()
            self._logger.log_metrics(metrics, step=self.step - 1, prefix="train/")
        else:
            log.warning("the gradient after step %d is not finite: its global batch changes nothing", self.step)
        return metrics

    def _global_batches(self, request: TrainRequest) -> Iterator[dict[str, torch.Tensor]]:
        """Dicts of `global_batch_size` rows on the model's device; zero where the mask lets nothing be read."""
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

    def _own(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this part's rows, every n-th of n parts', so that all parts have rows of one that was filled up."""
        return {name: x[self.parts.index :: self.parts.count] for name, x in batch.items()}

    def _report(self, name: str, done: list[tuple[dict[str, Any], float, int]]) -> TrainReport:
        """`done` has the metrics, the mask's sum and the count of masked tokens of each global batch."""
        if not done:
            raise InvalidRequest("the mask is 0 everywhere: there is nothing to learn from")
        metrics, weights, counts = zip(*done, strict=True)
        losses = [m["loss"] for m in metrics]
        num_skipped = sum(not math.isfinite(m.get("grad_norm", 0.0)) for m in metrics)

        def mean(key: str) -> float:
            return float(np.average([m.get(key, math.nan) for m in metrics], weights=weights))

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
        )

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _told(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics without tensors of one number, and those that the report has as floats; raises where they are not."""
    plain = {name: x.detach() if torch.is_tensor(x) else x for name, x in metrics.items()}
    told = {name: x.item() if torch.is_tensor(x) and x.numel() == 1 else x for name, x in plain.items()}
    return told | {name: float(told[name]) for name in _REPORTED if name in told}


def _nothing() -> None:
    """Stands for a hook that the user's model has not."""


def _writable(x: Any) -> Any:
    """A copy of an array that cannot be written, of which torch warns; else the same."""
    return x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x


def _numpy(x: Any) -> np.ndarray:
    made: np.ndarray = torch.as_tensor(x).detach().float().cpu().numpy()
    return made
