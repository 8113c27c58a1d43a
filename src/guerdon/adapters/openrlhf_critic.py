"""OpenRLHF's critic, served by `guerdon serve-critic`: its PPO command, started by this module.

    python -m guerdon.adapters.openrlhf_critic FLAGS --critic.model_name_or_path http://host:5556 \\
        --critic.num_nodes 1 --critic.num_gpus_per_node 1

FLAGS are those of `python -m openrlhf.cli.train_ppo_ray`. The critic's URL replaces a model, and one client process
without a GPU the actors of OpenRLHF's critic group.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.adapters.critics import connect, load_beside, rows_where, save_beside
from guerdon.errors import ConfigError


class CriticActor:
    """Replaces OpenRLHF's CriticModelActor: its trainer's calls, each for all micro-batches at once."""

    def __init__(self, world_size: int, rank: int, master_addr: str | None = None, master_port: int | None = None):
        self._world_size, self._rank = world_size, rank
        self._experiences: list[Any] = []

    def get_master_addr_port(self) -> tuple[str, int]:
        """Returns an address that the other processes do not need: the first one works alone."""
        return "", 0

    def init_model_from_pretrained(self, strategy: Any, url: str, max_steps: int) -> None:
        """Connects, and goes back to the checkpoint from which OpenRLHF resumes; raises ConfigError for wrong flags."""
        copies = strategy.args.ds.ring_attn_size * strategy.args.ds.tensor_parallel_size
        if self._world_size != copies:
            raise ConfigError(
                f"the critic's group has {self._world_size} processes, and a served critic needs {copies}",
                f"set --critic.num_nodes 1 --critic.num_gpus_per_node {copies}",
            )
        self._args, self._folder, self._step = strategy.args, Path(strategy.args.ckpt.path), 0
        if self._rank > 0:
            return
        saves = self._args.ckpt.save_steps > 0 and not self._args.ckpt.disable_ds
        self._critic = connect(url, saves=saves, instead="leave out --ckpt.save_steps")
        latest = self._folder / "_actor" / "latest"
        if self._args.ckpt.load_enable and latest.exists():
            tag = latest.read_text().strip()
            load_beside(self._critic, self._folder / "_critic" / tag)
            self._step = int(re.sub(r"\D", "", tag))

    def execute_batch(self, method_name: str, all_data: dict[str, Sequence[Any]], start_idx: int, end_idx: int) -> Any:
        """Calls a method with these micro-batches; the processes behind the first have no answers."""
        columns = {name: values[start_idx:end_idx] for name, values in all_data.items()}
        return [None] * (end_idx - start_idx) if self._rank > 0 else getattr(self, method_name)(**columns)

    def forward(self, sequences: Sequence[Any], action_mask: Sequence[Any], attention_mask: Sequence[Any]) -> list[Any]:
        """Returns the values `[B, A]` of the states before the actions, 0 where `action_mask` is, per micro-batch."""
        tokens = [row for both in zip(attention_mask, sequences, strict=True) for row in rows_where(*both)]
        values = iter(self._critic.infer(tokens=tokens).raise_for_failed().values)
        return [_spread(values, *masks) for masks in zip(attention_mask, action_mask, strict=True)]

    def append(self, experience: Sequence[Any]) -> list[None]:
        """Keeps these experiences for `fit`."""
        self._experiences += experience
        return [None] * len(experience)

    def fit(self) -> dict[str, float]:
        """Trains on the appended experiences in one request, `--train.max_epochs` times; returns their metrics."""
        if self._rank > 0:
            return {}
        self._step += 1
        parts, self._experiences = self._experiences, []
        tokens = [row for e in parts for row in rows_where(e.attention_mask, e.sequences)]
        returns, values, mask = (
            [row for e in parts for row in _gather(getattr(e, name), e.attention_mask)]
            for name in ("returns", "values", "action_mask")
        )
        report = self._critic.train(
            tokens, returns, values, mask, updates=self._args.train.max_epochs, train_id=f"{self._folder}:{self._step}"
        ).result()
        return {
            "critic_loss": report.loss,
            "values": float(np.concatenate(values) @ np.concatenate(mask) / sum(row.sum() for row in mask)),
            "critic_lr": report.learning_rate,
            "critic_grad_norm": report.grad_norm,
            "critic_explained_variance": report.explained_variance,
        }

    def save_checkpoint(self, tag: str, **_: Any) -> None:
        """Saves a checkpoint at the server, and its name in the folder of OpenRLHF's."""
        if self._rank == 0 and not self._args.ckpt.disable_ds:
            save_beside(self._critic, self._folder / "_critic" / tag, self._step)

    def save_model(self) -> None:
        """Saves a checkpoint at the server."""
        if self._rank == 0:
            self._critic.save()

    def empty_cache(self) -> None:
        """Does nothing, as `reload_states` and `offload_states`: no GPU of OpenRLHF's is used."""

    reload_states = offload_states = empty_cache


class WithoutGpu:
    """Replaces the Ray class whose actors OpenRLHF's RayActorGroup starts, each with a share of a GPU."""

    @staticmethod
    def options(resources: Any = None, **_: Any) -> Any:
        """Returns a Ray class that needs none."""
        import ray

        return ray.remote(CriticActor).options(num_cpus=0, num_gpus=0, resources=resources)


def _spread(values: Any, attention_mask: Any, action_mask: Any) -> Any:
    """Returns the next rows' values as OpenRLHF's critic does: the last A columns of all but the last token's."""
    import torch

    columns = torch.zeros(attention_mask.shape, dtype=torch.float32)
    for row, mask in zip(columns, attention_mask, strict=True):
        row[mask.bool()] = torch.tensor(next(values))
    return columns[:, :-1][:, -action_mask.shape[1] :] * action_mask.float()


def _gather(column: Any, attention_mask: Any) -> list[np.ndarray]:
    """Returns each row's numbers in a column `[B, A]`, at its tokens but the last, float32 `[T_i - 1]`."""
    import torch

    whole = torch.zeros(attention_mask.shape, dtype=torch.float32)
    whole[:, -1 - column.shape[1] : -1] = column
    return [row[:-1] for row in rows_where(attention_mask, whole)]


def main() -> None:
    """Runs OpenRLHF's PPO command with the served critic."""
    from openrlhf.trainer.ray import ppo_critic

    ppo_critic.CriticModelActor = WithoutGpu
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from guerdon.adapters import openrlhf_critic  # not as __main__, which Ray would pickle by value

    openrlhf_critic.main()
