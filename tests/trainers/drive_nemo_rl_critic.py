"""NeMo-RL's ppo_train with guerdon's critic as its value model.

    drive_nemo_rl_critic.py CHECKOUT URL ROLLOUTS CHECKPOINTS [STEP]

ROLLOUTS is a JSON file with the rollouts of each step: [{"messages": [[role, ids], ...], "reward": 1.0, "counts": 1}].
Rollouts come from that file, the policy learns nothing, and all else is NeMo-RL's: flattening, GAE, the loop, metrics.
With STEP the run resumes from that step's checkpoint. Prints each step's training data and metrics.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import typing
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import typing_extensions

sys.path.insert(0, sys.argv[1])
import torch

from guerdon.adapters import nemo_rl_critic

EPOCHS = 2


def load(name: str) -> Any:
    """A module of NeMo-RL; loggers and engines that it imports, and that have no part in this, may be missing."""
    typing.TypedDict = typing_extensions.TypedDict  # pydantic takes typing's own since Python 3.12, as NeMo-RL has it
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            missing = str(e.name)
            if missing.startswith(("nemo_rl", "guerdon")):
                raise
            stand_in = MagicMock(__path__=[], __spec__=ModuleSpec(missing, None))
            stand_in.__name__ = missing
            sys.modules[missing] = stand_in


def make_batch(rollouts: list[dict[str, Any]]) -> Any:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    logs = [
        [{"role": role, "content": "", "token_ids": torch.tensor(ids)} for role, ids in rollout["messages"]]
        for rollout in rollouts
    ]
    return BatchedDataDict(
        {
            "message_log": logs,
            "length": torch.tensor([len(log[0]["token_ids"]) for log in logs]),
            "total_reward": torch.tensor([rollout["reward"] for rollout in rollouts]),
            "loss_multiplier": torch.tensor([float(rollout["counts"]) for rollout in rollouts]),
        }
    )


def main(url: str, steps: list[list[dict[str, Any]]], folder: str, done: int = 0) -> list[Any]:
    ppo = load("nemo_rl.algorithms.ppo")
    from nemo_rl.algorithms.loss.loss_functions import MseValueLossConfig, MseValueLossFn
    from nemo_rl.utils.checkpoint import CheckpointManager

    nemo_rl_critic.register(url)
    last = os.path.join(folder, f"step_{done}") if done else None
    weights_path, optimizer_path = CheckpointManager.get_resume_paths(last, model_component="value")
    # As `setup` makes it.
    value = ppo.Value(
        cluster=None, config={}, tokenizer=None, name_prefix="lm_value", weights_path=weights_path,
        optimizer_path=optimizer_path, init_optimizer=True,
    )  # fmt: skip
    value.finish_training()

    left = iter(steps[done:])
    ppo.run_multi_turn_rollout = lambda **_: (make_batch(next(left)), {"mean_gen_tokens_per_sample": 1.0})
    found: list[Any] = []
    names = ("input_ids", "input_lengths", "token_mask", "sample_mask", "values", "returns", "advantages")

    def keep(data: Any, *_: Any, **__: Any) -> dict[str, Any]:
        found.append({name: data[name].tolist() for name in names})
        return {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": {}}

    policy, logger, checkpointer = MagicMock(), MagicMock(), MagicMock()
    policy.get_logprobs = lambda data, **_: {"logprobs": torch.zeros(data["input_ids"].shape)}
    policy.train, policy.get_logger_metrics, policy.get_step_metrics = keep, dict, dict
    checkpointer.save_optimizer = True
    checkpointer.init_tmp_checkpoint = lambda step, *_: os.path.join(folder, f"step_{step}")
    generation = {"colocated": {"enabled": True}, "backend": "vllm", "vllm_cfg": {"async_engine": False}}
    config = SimpleNamespace(
        ppo=ppo.PPOConfig(
            num_prompts_per_step=len(steps[0]), num_generations_per_prompt=1, max_num_steps=len(steps),
            ppo_epochs=EPOCHS, val_period=0, val_at_start=False,
            adv_estimator={
                "name": "gae", "gae_lambda": 0.8, "gae_gamma": 0.9, "normalize_advantages": False,
                "gae_lambda_value": None, "gae_lambda_policy": None, "length_adaptive_alpha": 0.0,
            },
        ),
        policy={"generation": generation, "make_sequence_length_divisible_by": 8, "max_total_sequence_length": 64},
        loss_fn=SimpleNamespace(
            reference_policy_kl_penalty=0, use_kl_in_reward=False, reference_policy_kl_type="k3"
        ),
        checkpointing={"checkpoint_must_save_by": None, "enabled": True, "save_period": 1, "metric_name": None},
        logger={}, cluster={"num_nodes": 1, "gpus_per_node": 1}, env={}, data={},
    )  # fmt: skip
    state = ppo._default_ppo_save_state()
    state["current_step"] = state["total_steps"] = done
    batches = [make_batch(rollouts) for rollouts in steps[done:]]
    loss = MseValueLossFn(MseValueLossConfig(scale=1.0, cliprange=0.2))
    tokenizer = SimpleNamespace(pad_token_id=0)
    for name in ("print_performance_metrics", "refit_policy_generation", "MemoryTracker"):  # of GPUs and Ray
        setattr(ppo, name, MagicMock())
    dataloader = MagicMock(__iter__=lambda _: iter(batches), __len__=lambda _: len(steps))
    dataloader.state_dict = dict
    ppo.ppo_train(
        policy, None, value, dataloader, None, tokenizer, None, loss, {}, None, logger, checkpointer, state, config
    )
    value.shutdown()
    logged = [call.args[0] for call in logger.log_metrics.call_args_list if call.kwargs.get("prefix") == "train"]
    for data, metrics in zip(found[::EPOCHS], logged[1::2], strict=True):
        data["metrics"] = {name: number for name, number in metrics.items() if name.startswith("critic/")}
    return found[::EPOCHS]


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        rollouts = json.load(file)
    answer = main(sys.argv[2], rollouts, sys.argv[4], *map(int, sys.argv[5:]))
    print("\n" + json.dumps(answer))
