"""NeMo-RL's create_env and calculate_rewards with guerdon's environment.

    drive_nemo_rl.py CHECKOUT URL SAMPLES [MODEL]

Ray runs the environment as the actor that it is in a run. Prints {"rewards": [...], "metrics": {...}}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, sys.argv[1])
os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[1], os.environ.get("PYTHONPATH", "")])
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import ray
import torch

from guerdon.adapters import nemo_rl


def rollouts() -> Any:
    """The module of rollouts; loggers and engines that it imports, and that have no part in this, may be missing."""
    while True:
        try:
            return importlib.import_module("nemo_rl.experience.rollouts")
        except ModuleNotFoundError as e:
            missing = str(e.name)
            if missing.startswith(("nemo_rl", "guerdon")):
                raise
            stand_in = MagicMock(__path__=[], __spec__=ModuleSpec(missing, None))
            stand_in.__name__ = missing
            sys.modules[missing] = stand_in


def main(url: str, samples: list[dict[str, Any]], model: str) -> dict[str, Any]:
    nemo_rl.register()
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.environments.utils import create_env

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    environment = create_env("guerdon", {"url": url, "model": model, "send": "texts", "labels": "label"})
    ids = torch.tensor([1])
    logs = [
        [
            {"role": "user", "content": s["prompt"], "token_ids": ids},
            {"role": "assistant", "content": s["response"], "token_ids": ids},
        ]
        for s in samples
    ]
    about = [{"label": s["label"]} for s in samples]
    batch = BatchedDataDict({"message_log": logs, "task_name": ["t"] * len(logs), "extra_env_info": about})
    told = rollouts().calculate_rewards(batch, {"t": environment})
    measured = environment.global_post_process_and_metrics.remote(BatchedDataDict({"rewards": told.rewards}))
    return {"rewards": told.rewards.tolist(), "metrics": ray.get(measured)[1]}


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        samples = json.load(file)
    print(json.dumps(main(sys.argv[2], samples, *sys.argv[4:5] or ["reward_model"])))
