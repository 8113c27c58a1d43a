"""verl's critic, served by `guerdon serve-critic`: the flags of verl's own command replace its worker group.

    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=guerdon.adapters.verl_critic
    critic.enable=False
    +critic.server.url=http://host:5556

verl imports this module at its own import, and the trainers get a `CriticGroup` as their `critic_wg` when they look for
a checkpoint to resume from, which is after their workers were placed and before the first step.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from guerdon.adapters.critics import at_tokens_before, before_responses, connect, load_beside, rows_where, save_beside
from guerdon.adapters.judge import refuse_unknown
from guerdon.client import CriticClient
from guerdon.critic_core import TrainReport
from guerdon.errors import ConfigError

log = logging.getLogger(__name__)

_SETTINGS = ("url", "name", "timeout_s")
_TRAINED_ON = ("values", "returns", "response_mask")


class CriticGroup:
    """Stands for the worker group of verl's critic: the same methods, answered by the served critic.

    Batches are verl's own: TensorDicts, keys of its TransferQueue, or of older trainers padded DataProtos.
    A train request has the id that `train_id` gives at that moment, so that a step that is repeated is applied once.
    """

    def __init__(self, critic: CriticClient, train_id: Callable[[], str], epochs: int = 1) -> None:
        self._critic, self._train_id, self._epochs = critic, train_id, epochs

    def infer_batch(self, batch: Any) -> _Finished:
        """Computes the value at each token of the whole rows; those of a batch in the queue are put there."""
        import torch
        from verl.utils import tensordict_utils as tu

        values = self._infer(_tokens(_read(batch, "input_ids")))
        nested = torch.nested.as_nested_tensor([torch.tensor(row) for row in values], layout=torch.jagged)
        answer = tu.get_tensordict({"values": nested})
        if _is_queued(batch):
            import transfer_queue

            transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=answer)
        return _Finished(answer)

    def train_mini_batch(self, batch: Any) -> _Finished:
        """Trains on the batch, `critic.ppo_epochs` times, with the server's optimiser, loss and global batches."""
        from verl.utils import tensordict_utils as tu

        metrics = {"mfu": 0.0, **_metrics(self._train(_read(batch, "input_ids", *_TRAINED_ON)))}  # verl asks for mfu
        return _Finished(tu.get_tensordict({}, {"metrics": metrics}))

    def compute_values(self, batch: Any) -> Any:
        """Returns a DataProto with the values `[B, R]` of the states before the responses' tokens, as verl 0.7 asks."""
        import torch
        from verl import DataProto

        tokens, mask = _tokens(batch.batch), batch.batch["response_mask"]
        values = torch.zeros(mask.shape, dtype=torch.float32)
        lengths = _response_lengths(batch.batch)
        for row, found in zip(values, before_responses(self._infer(tokens), lengths), strict=True):
            row[: len(found)] = torch.tensor(found)
        return DataProto.from_dict(tensors={"values": values * mask})

    def update_critic(self, batch: Any) -> Any:
        """Trains as `train_mini_batch`; returns a DataProto with the metrics, as verl 0.7 asks."""
        from verl import DataProto

        metrics = {f"critic/{name}": value for name, value in _metrics(self._train(batch.batch)).items()}
        return DataProto.from_single_dict(data={}, meta_info={"metrics": metrics})

    def save_checkpoint(self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, **_: Any) -> None:
        """Saves a checkpoint at the server, and its name in verl's folder."""
        save_beside(self._critic, local_path, global_step)

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        """Takes the critic back to the checkpoint of that folder, so that steps made after it are made again."""
        load_beside(self._critic, local_path)

    def start_profile(self, **_: Any) -> None:
        """Does nothing, as `stop_profile`: the server has its own metrics."""

    stop_profile = start_profile

    def _infer(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        return self._critic.infer(tokens=tokens).raise_for_failed().values

    def _train(self, batch: Any) -> TrainReport:
        tokens, lengths = _tokens(batch), _response_lengths(batch)
        columns = ([row[:n].numpy() for row, n in zip(batch[name].unbind(), lengths, strict=True)]
                   for name in _TRAINED_ON)  # fmt: skip
        values, returns, mask = (at_tokens_before(column, tokens) for column in columns)
        future = self._critic.train(tokens, returns, values, mask, updates=self._epochs, train_id=self._train_id())
        return future.result()


class _Finished:
    """An answer that is there, in place of the future that verl's trainers get from a worker group."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.futures: list[Any] = []  # one trainer waits for these first

    def get(self) -> Any:
        return self._answer


def attach(trainer: Any) -> None:
    """Gives a trainer's class of verl the served critic if its config has `critic.server`."""
    load = trainer._load_checkpoint

    @functools.wraps(load)
    def load_with_critic(self: Any) -> Any:
        if self.config.critic.get("server") is not None:
            self.critic_wg, self.use_critic = _make_group(self), True
        return load(self)

    trainer._load_checkpoint = load_with_critic


def _make_group(trainer: Any) -> CriticGroup:
    settings, about = dict(trainer.config.critic.server), trainer.config.trainer
    refuse_unknown(settings.keys() - {*_SETTINGS}, "critic.server.", ", ".join(_SETTINGS))
    if "url" not in settings:
        raise ConfigError("critic.server.url is not given", "add +critic.server.url=http://host:5556")
    tokenizer = getattr(trainer, "tokenizer", None)
    saves = about.save_freq > 0
    critic = connect(**settings, saves=saves, instead="leave out trainer.save_freq", tokenizer=tokenizer)
    state = critic.state()
    log.warning("the critic is served: %s, step %d, weights %s", settings["url"], state.step, state.weights_version)

    def train_id() -> str:
        part = getattr(trainer, "local_trigger_step", 0)  # several updates a step, in separate_async
        return f"{about.project_name}/{about.experiment_name}:{trainer.global_steps}.{part}"

    return CriticGroup(critic, train_id, trainer.config.critic.ppo_epochs)


def _is_queued(batch: Any) -> bool:
    return hasattr(batch, "partition_id")


def _read(batch: Any, *names: str) -> Any:
    """Returns the batch with these columns, which the trainers since verl 0.8 keep in TransferQueue."""
    if not _is_queued(batch):
        return batch
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*names])


def _tokens(batch: Any) -> list[np.ndarray]:
    """Returns each row's tokens without padding, which is on both sides."""
    ids = batch["input_ids"]
    if ids.is_nested:
        return [row.numpy() for row in ids.unbind()]
    return rows_where(batch["attention_mask"], ids)


def _response_lengths(batch: Any) -> list[int]:
    mask = batch["response_mask"]
    if mask.is_nested:
        return mask.offsets().diff().tolist()
    return batch["attention_mask"][:, -mask.shape[1] :].sum(1).tolist()


def _metrics(report: TrainReport) -> dict[str, float]:
    return {
        "vf_loss": report.loss,
        "vf_clipfrac": report.clip_fraction,
        "explained_variance": report.explained_variance,
        "grad_norm": report.grad_norm,
        "lr": report.learning_rate,
        "skipped_steps": float(report.num_skipped),
    }


if importlib.util.find_spec("verl") is not None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    attach(RayPPOTrainer)
    if importlib.util.find_spec("verl.trainer.ppo.v1") is not None:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        attach(PPOTrainer)
