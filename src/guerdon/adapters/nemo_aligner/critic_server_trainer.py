"""Offers `CriticServerTrainer` with NeMo-Aligner's signature: guerdon's server for your own critic and optimiser."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
import torch

from guerdon.adapters.nemo_aligner.remote_clients import read_setting
from guerdon.assembly import Parts, build_service, run
from guerdon.core import Command, Executor, ModelInfo, Signal
from guerdon.critic_core import ControlRequest, Operation, TrainRequest
from guerdon.distributed import parts
from guerdon.distributed.ranks import Ranks
from guerdon.engine.functions import FunctionEncoder, check_batching
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.padded_rows import read_rows
from guerdon.server.batching.jobs import Limits
from guerdon.server.critic.controller import Critic
from guerdon.server.service import Service
from guerdon.settings.config import CriticConfig, ServerConfig
from guerdon.training.user_critic import UserCritic

_NAME = "critic"
_OPERATIONS = (Operation.TRAIN, Operation.VALIDATE, Operation.SAVE, Operation.STATE)
_TRAINED_ON = ("tokens", "returns", "prev_values", "mask")


class CriticServerTrainer:
    """Serves a user's critic as `critic_infer`, `critic_train`, `critic_save`, and trains it with their optimiser.

    `critic_validate` and `critic_state` come with them. `host` is the address to listen on, by default this machine's
    own; NeMo-Aligner's class listens on all addresses. 0.0.0.0 needs keys in GUERDON_API_KEYS or `allow_anonymous`,
    because other machines reach it.

    `model` is a torch module with `infer(inputs=(tokens [B,T], lengths [B])) -> values [B,T]` or, if
    `cfg.combine_rm_and_critic_server`, `infer_rm_critic` of the same inputs `-> (rewards [B] or [B,1], values)`; and
    `get_loss_and_metrics(batch, forward_only) -> (loss, metrics)`, which leaves the gradient of one global batch of
    `gbs` rows in its parameters, or computes none with `forward_only`. Its `prepare_for_inference`,
    `finish_inference`, `prepare_for_training`, `finish_training`, `prepare_for_training_step` and
    `finish_training_step` are called if it has them.

    `cfg`, by attribute or by key: `port`, `inference_micro_batch_size`, `combine_rm_and_critic_server`; optionally
    `max_queue_delay_microseconds` (2000), `strip_sequence_length_to_multiple` and `gradient_clip_val` (None).
    `ckpt_callback.custom_save` saves; guerdon keeps no journal, so training after the last save is lost with the
    process.

    `data_parallel_size` ranks each compute an equal part of every batch, and `inference_micro_batch_size` is multiplied
    by it, as in NeMo-Aligner; the model sums its gradients over them. A part's mask may be 0 everywhere.
    Default: that of Megatron if it is initialised in this process; else 1, and every rank computes all rows.
    """

    def __init__(
        self,
        cfg: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        logger: Any,
        ckpt_callback: Any,
        tokenize_func: Any,
        gbs: int,
        model_forward_micro_batch_size: int,
        *,
        host: str = "127.0.0.1",
        allow_anonymous: bool = False,
        data_parallel_size: int | None = None,
    ) -> None:
        self.data_parallel_size = count = parts.data_parallel_size(data_parallel_size)
        sizes = read_setting(cfg, "inference_micro_batch_size")
        self.batch_sizes = tuple(size * count for size in ((sizes,) if isinstance(sizes, int) else sizes))
        if not self.batch_sizes or min(*self.batch_sizes, model_forward_micro_batch_size, gbs) < 1:
            raise ConfigError("a batch size is below 1", "give sizes of at least 1")
        if gbs % count:
            raise ConfigError(f"gbs is {gbs}, and data_parallel_size is {count}", "give a multiple of it")
        self.max_delay_s = float(read_setting(cfg, "max_queue_delay_microseconds", 2000)) / 1e6
        strip = read_setting(cfg, "strip_sequence_length_to_multiple", None)
        check_batching(self.max_delay_s * 1e6, strip)
        self.cfg, self.model, self.optimizer, self.scheduler = cfg, model, optimizer, scheduler
        self.logger, self.ckpt_callback, self.gbs = logger, ckpt_callback, gbs
        is_combined = bool(read_setting(cfg, "combine_rm_and_critic_server"))
        self.config = ServerConfig(
            host=host,
            port=int(read_setting(cfg, "port")),
            grpc_port=None,
            allow_anonymous=allow_anonymous,
            critic=CriticConfig(name=_NAME),
        )
        self.critic = UserCritic(
            ModelInfo(
                f"{_NAME}_infer",
                "function",
                outputs=("values", "rewards") if is_combined else ("values",),
                path="padded",
                why="a user's critic",
            ),
            model,
            optimizer,
            scheduler,
            logger,
            encoder=FunctionEncoder(tokenize_func),
            save_elsewhere=self.save,
            global_batch_size=gbs,
            forward_batch_size=model_forward_micro_batch_size,
            strip_to_multiple=strip or 1,
            gradient_clip_val=float(read_setting(cfg, "gradient_clip_val", None) or 0.0) or math.inf,
        )

    @property
    def step(self) -> int:
        """Optimiser steps made."""
        return self.critic.step

    @overload
    def run_inference(self, inputs: Mapping[str, Any]) -> tuple[np.ndarray | None, np.ndarray]: ...

    @overload
    def run_inference(self, *, tokens: Any, sequence_lengths: Any) -> dict[str, np.ndarray]: ...

    @overload
    def run_inference(self, *, sentences: Any) -> dict[str, np.ndarray]: ...

    def run_inference(self, inputs: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Returns float32 `(rewards [B], values [B,T])` of `inputs`: `inputs` `[B,T]` and `sequence_length` `[B,1]`.

        The rewards are None if the reward model is not combined with the critic. Given `tokens` and `sequence_lengths`,
        or `sentences` (bytes or str `[B,1]`), returns a dict as `critic_infer` does: `values` `[B,T]` and, if combined,
        `rewards` `[B,1]`.
        """
        if inputs is not None:
            return self.critic.infer(*read_rows(inputs["inputs"], inputs["sequence_length"]))
        if set(named) == {"sentences"}:
            tokens, lengths = self.critic.encoder.padded(named["sentences"])
        elif set(named) == {"tokens", "sequence_lengths"}:
            tokens, lengths = read_rows(named["tokens"], named["sequence_lengths"])
        else:
            raise InvalidRequest(
                f"run_inference takes inputs, or tokens with sequence_lengths, or sentences, not {sorted(named)}"
            )
        rewards, values = self.critic.infer(tokens, lengths)
        return {"values": values} if rewards is None else {"values": values, "rewards": rewards[:, None]}

    @overload
    def run_training(self, tokens: Any, returns: Any, prev_values: Any, mask: Any, /) -> float: ...

    @overload
    def run_training(self, *, tokens: Any, returns: Any, prev_values: Any, mask: Any) -> dict[str, np.ndarray]: ...

    def run_training(self, *batch: Any, **named: Any) -> float | dict[str, np.ndarray]:
        """Makes one optimiser step per global batch of `tokens` `[N,T]` and `returns`, `prev_values`, `mask` `[N,T-1]`.

        Returns the mean of their losses, weighted by their masks' sums: given by keyword what `critic_train` answers, a
        dict with `loss_mean` `[1]`, else a float. The last global batch is filled up to `gbs` rows with mask 0. Raises
        TrainFailed if the model raises.
        """
        given = dict(zip(_TRAINED_ON, batch, strict=False)) | named
        if len(batch) + len(named) != len(_TRAINED_ON) or set(given) != set(_TRAINED_ON):
            raise InvalidRequest(f"run_training takes {', '.join(_TRAINED_ON)}")
        tokens = np.asarray(given.pop("tokens"), dtype=np.int64)
        arrays: dict[str, Any] = {name: np.asarray(x, dtype=np.float32) for name, x in given.items()}
        loss = self.critic.train(TrainRequest("", tokens, **arrays)).loss
        return loss if batch else {"loss_mean": np.array([loss], dtype=np.float32)}

    def save(
        self, extra_candidates: dict[str, Any] | None = None, is_train_end: bool = False, save_top_only: bool = False
    ) -> None:
        """Saves through `ckpt_callback.custom_save(monitor_candidates, is_train_end, save_top_only)`."""
        candidates = {name: torch.tensor(value, dtype=torch.int32) for name, value in self.state_dict().items()}
        with self.critic.calling_hooks("prepare_for_training", "finish_training"):
            self.ckpt_callback.custom_save(
                monitor_candidates=candidates | (extra_candidates or {}),
                is_train_end=is_train_end,
                save_top_only=save_top_only,
            )

    def state_dict(self) -> dict[str, int]:
        """Returns the trainer's own state: `step`, the number of optimiser steps."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Sets the step from `state_dict["step"]`; the caller loads weights and optimiser."""
        self.critic.restart_at(int(state_dict["step"]))

    def run_server(self) -> None:
        """Serves until SIGTERM or SIGINT; then finishes what was accepted and returns.

        If this process is one of several, started by torchrun or joined by torch.distributed, all must call it: rank 0
        serves, and every rank performs each command on the rows of its data-parallel part. If ranks have the same rows,
        the first one's scores count; losses are rank 0's.
        """
        run(self.config, self._parts())

    def build_service(self) -> Service:
        """Returns the service that `run_server` runs, for your own event loop; in this process only."""
        return build_service(self.config, self._parts())

    def _parts(self) -> Parts:
        limits = Limits(
            max_batch_tokens=self.critic.max_batch_tokens,
            shares=False,
            batch_sizes=self.batch_sizes,
            max_delay_s=self.max_delay_s,
        )
        return Parts(
            trainer=self._trainer,
            critic=functools.partial(_Operations, operations=_OPERATIONS),
            limits={self.critic.info.name: limits},
        )

    def _trainer(self, config: CriticConfig, ranks: Ranks) -> UserCritic:
        self.critic.ranks = ranks
        self.critic.parts = parts.BatchParts.of(ranks, self.data_parallel_size)
        return self.critic


class _Operations(Critic):
    """Performs the operations of a critic that the user's callback saves."""

    def save(self, asked: ControlRequest, group: Executor) -> None:
        """Calls the user's callback to save; raises ServerFault if a failed step left the weights undefined."""
        self._check_sound()
        group.execute(Command(Signal.SAVE, self.name))
        self.store.num_unsaved = 0
        self._show()
