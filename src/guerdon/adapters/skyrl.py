"""SkyRL's PPO with a served critic, by the flags of its own command:

    trainer.override_entrypoint=guerdon.adapters.skyrl
    trainer.algorithm.advantage_estimator=gae
    trainer.critic.model.path=http://host:5556

`with_critic` does the same to any trainer's class of SkyRL's, for an entry point of one's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from guerdon.adapters.critics import at_tokens_before, before_responses, connect, load_beside, rows_where, save_beside
from guerdon.client import CriticClient

_METRICS = {
    "critic_loss": "loss", "values_clipfrac": "clip_fraction", "critic_lr": "learning_rate", "grad_norm": "grad_norm",
    "explained_variance": "explained_variance",
}  # fmt: skip
"""SkyRL's names of a report's fields."""


def with_critic(trainer: Any) -> Any:
    """Returns a subclass of a SkyRL trainer's class whose critic is served at `trainer.critic.model.path`, a URL."""

    class ServedCriticTrainer(trainer):
        has_critic = False  # SkyRL places none, and asks none
        _critic: CriticClient

        def build_models(self, *workers: Any) -> None:
            """Builds all models but the critic, and connects to it."""
            model = self.cfg.trainer.critic.model
            url, model.path = model.path, None
            super().build_models(*workers)
            model.path = url
            saves = self.cfg.trainer.ckpt_interval > 0
            self._critic = connect(
                url, saves=saves, instead="set trainer.ckpt_interval=-1", tokenizer=getattr(self, "tokenizer", None)
            )

        def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
            """Adds the values of the states before each token of the responses, beside SkyRL's log-probs."""
            import torch

            training_input = super().fwd_logprobs_values_reward(training_input)
            mask = training_input["response_mask"].bool()
            tokens = rows_where(training_input["attention_mask"], training_input["sequences"])
            values = self._critic.infer(tokens=tokens).raise_for_failed().values
            found = before_responses(values, mask.sum(1).tolist())
            table = torch.zeros(mask.shape)
            table[mask] = torch.cat([torch.from_numpy(row) for row in found])
            training_input["values"] = table
            return training_input

        def train_critic_and_policy(self, data: Any) -> Any:
            """Trains the critic at the server, while the policy is trained here."""
            count = len(data["sequences"]) - data.metadata["pad_size"]
            tokens = rows_where(data["attention_mask"], data["sequences"])[:count]
            # Each response counts as one, however long it is: so SkyRL's loss is the mean of the responses' means.
            weights = data["loss_mask"] / data["loss_mask"].sum(1, keepdim=True).clamp(min=1)
            columns = [
                at_tokens_before(rows_where(data["response_mask"][:count], table[:count]), tokens)
                for table in (data["returns"], data["values"], weights)
            ]
            about = self.cfg.trainer
            train_id = f"{about.project_name}/{about.run_name}:{self.global_step}"
            future = self._critic.train(tokens, *columns, updates=about.update_epochs_per_batch, train_id=train_id)
            status = super().train_critic_and_policy(data)
            report = future.result()
            self.all_metrics.update({f"critic/{name}": getattr(report, ours) for name, ours in _METRICS.items()})
            return status

        def save_checkpoints(self) -> str:
            """Saves a checkpoint at the server, and its name in SkyRL's folder, which becomes the latest after that."""
            folder = Path(self.cfg.trainer.ckpt_path) / f"global_step_{self.global_step}"
            save_beside(self._critic, folder / "critic", self.global_step)
            saved: str = super().save_checkpoints()
            return saved

        def load_checkpoints(self) -> Any:
            """Takes the critic back to the checkpoint of the folder from which SkyRL resumes."""
            loaded = super().load_checkpoints()
            if loaded[1] is not None:
                load_beside(self._critic, Path(loaded[1]) / "critic")
            return loaded

    return ServedCriticTrainer


def main() -> None:
    """Runs SkyRL's own training with a served critic; SkyRL calls it by `trainer.override_entrypoint`."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import validate_cfg
    from skyrl.train.utils import initialize_ray

    flags = [flag for flag in sys.argv[1:] if not flag.startswith("trainer.override_entrypoint=")]
    config = SkyRLTrainConfig.from_cli_overrides(flags)
    validate_cfg(config)
    initialize_ray(config)
    ray.get(ray.remote(num_cpus=1)(_run).remote(config))


def _run(config: Any) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.trainer import RayPPOTrainer

    class Experiment(BasePPOExp):
        def get_trainer(self, **arguments: Any) -> Any:
            return with_critic(RayPPOTrainer)(**arguments)

    Experiment(config).run()
