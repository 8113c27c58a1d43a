"""verl's PPO trainers with a served critic: `drive_verl_critic.py v1|v0|FOLDER FLAGS ROWS POLICY`.

FOLDER has an older release, whose trainer is v0. FLAGS are those of the page, as JSON; ROWS has {"prompt", "response",
"mask", "reward"} of token ids; POLICY is a folder with a tokenizer and a config. verl's `run_ppo` starts a task runner
on Ray, which builds the trainer and has it do two PPO steps on the rows, save, do a third, and do it again as a new
trainer that resumes from the checkpoint. Only what needs a GPU is left out: the actor's workers and the rollout. Prints
for each step what verl has of the critic.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

if Path(sys.argv[1]).is_dir():
    os.environ["PYTHONPATH"] = f"{sys.argv[1]}{os.pathsep}{os.environ['PYTHONPATH']}"  # for Ray's workers
    sys.path.insert(0, sys.argv[1])

import ray
import torch
from hydra import compose, initialize_config_module
from verl import DataProto
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.ray_trainer import compute_advantage


class Actor:
    """Stands for the worker group of the actor; `placed` has all roles for which verl asked for workers."""

    placed: ClassVar[list[str]] = []

    def __init__(self, **_: Any) -> None: ...

    def spawn(self, prefix_set: Any) -> dict[str, Actor]:
        self.placed.extend(prefix_set)
        return dict.fromkeys(prefix_set, self)

    def init_model(self) -> None: ...

    def load_checkpoint(self, *_: Any, **__: Any) -> None: ...

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        os.makedirs(path)


class Nothing:
    """Stands for what serves rollouts and rewards."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @classmethod
    def create(cls, *_: Any, **__: Any) -> Nothing:
        return cls()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


class Prompts:
    """Stands for the data loader."""

    def __len__(self) -> int:
        return 10

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def nested(rows: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def listed(rows: torch.Tensor, mask: list[list[int]]) -> list[list[float]]:
    return [row[: len(m)].tolist() for row, m in zip(rows.unbind(), mask, strict=True)]


class V1:
    """The trainer that verl starts by default, whose batches are in TransferQueue."""

    def __init__(self, config: Any) -> None:
        import transfer_queue
        from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

        self.tq = transfer_queue
        for name in ("RewardLoopManager", "LLMServerManager", "CheckpointEngineManager"):
            setattr(trainer_base, name, Nothing)
        trainer_base.RayWorkerGroup = Actor
        config.transfer_queue.enable = True
        self.tq.init(config.transfer_queue)
        self.config, self.cls = config, get_trainer_cls(config.trainer.v1.trainer_mode)

    def new_trainer(self) -> Any:
        trainer = self.cls(config=self.config)
        trainer._init_dataloader = lambda: setattr(trainer, "train_dataloader", Prompts())
        trainer._setup()
        trainer.global_steps += 1
        return trainer

    def step(self, trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        keys, mask = [f"{trainer.global_steps}_{i}" for i in range(len(rows))], [row["mask"] for row in rows]
        rewards = [[0.0] * (len(row["mask"]) - 1) + [row["reward"]] for row in rows]
        columns = {
            "input_ids": nested([row["prompt"] + row["response"] for row in rows], torch.int64),
            "response_mask": nested(mask, torch.int64),
            "rm_scores": nested(rewards, torch.float32),
            "rollout_log_probs": nested(rewards, torch.float32),
            "old_log_probs": nested(rewards, torch.float32),
            "ref_log_prob": nested(rewards, torch.float32),
            "uid": [str(i) for i in range(len(rows))],
        }
        from verl.utils import tensordict_utils as tu

        tags = [{"seq_len": len(row["prompt"] + row["response"]), "is_padding": False} for row in rows]
        batch = self.tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.get_tensordict(columns), tags=tags)
        metrics: dict[str, Any] = {}
        batch = trainer._compute_values(batch, metrics)
        batch = trainer._compute_advantage(batch, metrics)
        batch = trainer._update_critic(batch, metrics)
        wanted = ["values", "returns", "advantages"]
        told = self.tq.kv_batch_get(keys=keys, partition_id="train", select_fields=wanted)
        trainer.global_steps += 1
        return {name: listed(told[name], mask) for name in wanted} | {"metrics": metrics}

    def save(self, trainer: Any) -> None:
        trainer._save_checkpoint()

    def close(self) -> None:
        self.tq.close()


class V0:
    """The older trainer, whose batches are padded on both sides."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def new_trainer(self) -> Any:
        from verl.trainer.ppo import ray_trainer

        trainer = object.__new__(ray_trainer.RayPPOTrainer)  # its __init__ wants data sets
        trainer.config, trainer.use_critic, trainer.global_steps = self.config, ray_trainer.need_critic(self.config), 0
        trainer.actor_rollout_wg, trainer.train_dataloader = Actor(), Prompts()
        trainer.checkpoint_callback, trainer.use_legacy_worker_impl = None, "auto"
        trainer._load_checkpoint()
        trainer.global_steps += 1
        return trainer

    def step(self, trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch, mask = padded(rows), [row["mask"] for row in rows]
        values = trainer._compute_values(batch)
        batch = batch.union(values)
        batch = compute_advantage(batch, adv_estimator="gae", gamma=1.0, lam=1.0, config=self.config.algorithm)
        update = trainer._update_critic(batch)
        trainer.global_steps += 1
        told = {name: listed(batch.batch[name], mask) for name in ("values", "returns", "advantages")}
        return told | {"metrics": dict(update.meta_info["metrics"])}

    def save(self, trainer: Any) -> None:
        trainer._save_checkpoint()

    def close(self) -> None: ...


def padded(rows: list[dict[str, Any]]) -> DataProto:
    left, right = (max(len(row[name]) for row in rows) for name in ("prompt", "response"))

    def column(prompt: Any, response: Any) -> torch.Tensor:
        return torch.tensor(
            [[0] * (left - len(row["prompt"])) + prompt(row) + response(row) + [0] * (right - len(row["response"]))
             for row in rows]
        )  # fmt: skip

    ids = column(lambda row: row["prompt"], lambda row: row["response"])
    attention = column(lambda row: [1] * len(row["prompt"]), lambda row: [1] * len(row["response"]))
    mask = column(lambda row: [0] * len(row["prompt"]), lambda row: row["mask"])[:, left:]
    rewards = torch.zeros(mask.shape)
    for row, reward in zip(rows, rewards, strict=True):
        reward[len(row["mask"]) - 1] = row["reward"]
    return DataProto.from_dict(
        tensors={"input_ids": ids, "prompts": ids[:, :left], "responses": ids[:, left:], "attention_mask": attention,
                 "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "response_mask": mask,
                 "token_level_rewards": rewards},
    )  # fmt: skip


@ray.remote
class Runner:
    def run(self, config: Any) -> None:
        self.told = told = {}
        rows = json.loads(Path(config.trainer.rows).read_text())
        way = V1(config) if config.trainer.get("use_v1") else V0(config)
        trainer = way.new_trainer()
        told["steps"] = [way.step(trainer, rows), way.step(trainer, rows[::-1])]
        trainer.global_steps -= 1  # verl saves before it counts on
        way.save(trainer)
        trainer.global_steps += 1
        told["steps"].append(way.step(trainer, rows))
        resumed = way.new_trainer()
        told["resumed_at"] = resumed.global_steps
        told["steps"].append(way.step(resumed, rows))
        told["placed"] = Actor.placed
        way.close()
        Path(config.trainer.told).write_text(json.dumps(told, default=float))


if __name__ == "__main__":
    kind, flags, rows, policy = sys.argv[1:]
    told = Path("told.json").absolute()
    of_kind = {"v0": ["trainer.use_v1=False"], "v1": ["transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [
            *json.loads(flags), *of_kind.get(kind, []), f"+trainer.rows={rows}", f"+trainer.told={told}",
            f"trainer.default_local_dir={told.parent}/trained", "trainer.n_gpus_per_node=1", "trainer.device=cpu",
            "ray_kwargs.ray_init.num_cpus=4", "+ray_kwargs.ray_init.num_gpus=1",
            f"actor_rollout_ref.model.path={policy}",
        ])  # fmt: skip
    run_ppo(config, Runner)
    print(told.read_text())
