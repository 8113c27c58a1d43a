"""SkyRL's RayPPOTrainer with guerdon's critic, step by step as its `train` goes.

    drive_skyrl_critic.py CHECKOUT URL ROLLOUTS CHECKPOINTS [STEP]

ROLLOUTS is a JSON file with each step's {"prompts": [ids, ...], "responses": [ids, ...], "rewards": [[0, 1.0], ...],
"masks": [[1, 0], ...]}. The policy's workers are left out: it learns nothing. All else is SkyRL's: batches and their
padding, GAE, mini-batches, checkpoints' folders. With STEP it resumes from that step. Prints each step's data.
"""

from __future__ import annotations

import importlib
import json
import sys
import typing
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import typing_extensions

sys.path.insert(0, sys.argv[1])
sys.path.insert(1, f"{sys.argv[1]}/skyrl-gym")

from guerdon.adapters import skyrl as entrypoint


def load(name: str) -> Any:
    """A module of SkyRL; engines that it imports, and that have no part in this, may be missing."""
    typing.TypedDict = typing_extensions.TypedDict  # pydantic takes typing's own since Python 3.12, as SkyRL has it
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            missing = str(e.name)
            if missing.startswith(("skyrl.", "guerdon")):
                raise
            stand_in = MagicMock(__path__=[], __spec__=None)
            stand_in.__name__ = missing
            sys.modules[missing] = stand_in


class Policy:
    """In place of SkyRL's WorkerDispatch, the policy's workers; it has no critic, and knows no call for one."""

    def __init__(self, critic_actor_group: Any, **_: Any) -> None:
        assert critic_actor_group is None

    def get_lcm_dp_size(self) -> int:
        return 4  # of three rows, so that SkyRL pads the batch

    def forward(self, model: str, data: Any) -> Any:
        assert model == "policy"
        row = {"logprobs": [0.0] * data.metadata["response_length"]}
        return SimpleNamespace(loss_fn_outputs=[row] * len(data["sequences"]))

    def stage_data(self, model: str, data: Any, boundaries: Any) -> list[Any]:
        assert model == "policy"
        return [None] * len(boundaries)

    def forward_backward_from_staged(self, model: str, chunks: Any) -> Any:
        return SimpleNamespace(metrics={"loss": 0.0})

    def optim_step(self, model: str) -> None:
        assert model == "policy"

    def empty_cache(self, model: str | None = None) -> None:
        pass

    def save_checkpoint(self, model: str, *_: Any) -> None:
        assert model == "policy"

    def load_checkpoint(self, model: str, *_: Any, **__: Any) -> None:
        assert model == "policy"

    def get_node_ids(self) -> list[str]:
        return []


def configure(*flags: str) -> Any:
    """The config with which SkyRL's own command, and its checks of the config, start guerdon's entry point."""
    base = load("skyrl.train.entrypoints.main_base")
    import ray
    import skyrl.train.utils

    skyrl.train.utils.initialize_ray = lambda config: None
    configs: list[Any] = []
    ray.remote, ray.get = lambda **_: lambda run: SimpleNamespace(remote=run), lambda value: value
    with patch.object(entrypoint, "_run", configs.append):
        sys.argv[1:] = flags
        base.main()
    return configs[0]


def main(url: str, steps: list[dict[str, Any]], folder: str, done: int = 0) -> list[Any]:
    module = load("skyrl.train.trainer")
    module.WorkerDispatch, module.PPORayActorGroup, module.ray = Policy, MagicMock(), MagicMock()
    module.run_on_each_node = lambda *_: None
    config = configure(
        "trainer.override_entrypoint=guerdon.adapters.skyrl", "trainer.algorithm.advantage_estimator=gae",
        "trainer.algorithm.gamma=0.9", "trainer.algorithm.lambd=0.8", f"trainer.critic.model.path={url}",
        f"trainer.ckpt_path={folder}", "trainer.ckpt_interval=1", "trainer.train_batch_size=3",
        "trainer.policy_mini_batch_size=3", "trainer.critic_mini_batch_size=3", "trainer.logger=console",
        "trainer.micro_forward_batch_size_per_gpu=1", "trainer.micro_train_batch_size_per_gpu=1",
        "trainer.update_epochs_per_batch=2", "trainer.recompute_old_logprobs_per_minibatch=false",
        "generator.n_samples_per_prompt=1",
        "generator.inference_engine.enable_ray_prometheus_stats=false",
        "trainer.placement.colocate_all=false", "trainer.algorithm.use_kl_loss=false",
        f"trainer.resume_mode={'latest' if done else 'none'}",
    )  # fmt: skip
    trainer = entrypoint.with_critic(module.RayPPOTrainer)(
        cfg=config, tracker=MagicMock(), tokenizer=SimpleNamespace(pad_token_id=0), train_dataset=None,
        inference_engine_client=MagicMock(), generator=MagicMock(),
    )  # fmt: skip
    trainer.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    trainer.build_models(None, None, None)
    assert config.trainer.critic.model.path == url
    if done:
        trainer.global_step, _ = trainer.load_checkpoints()
        assert trainer.global_step == done
    found = []
    for step in steps[done:]:
        trainer.global_step += 1
        output = {
            "prompt_token_ids": step["prompts"], "response_ids": step["responses"], "rewards": step["rewards"],
            "loss_masks": step["masks"],
        }  # fmt: skip
        data = trainer.convert_to_training_input(output, [str(i) for i in range(len(step["prompts"]))])
        data = trainer.fwd_logprobs_values_reward(data)
        data = trainer.compute_advantages_and_returns(data)
        returns, values = data["returns"].tolist(), data["values"].tolist()
        trainer.train_critic_and_policy(data)
        trainer.save_checkpoints()
        metrics = {name: number for name, number in trainer.all_metrics.items() if name.startswith("critic/")}
        found.append({"values": values, "returns": returns, "metrics": metrics})
    return found


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        rollouts = json.load(file)
    answer = main(sys.argv[2], rollouts, sys.argv[4], *map(int, sys.argv[5:]))
    print("\n" + json.dumps(answer))
