"""OpenRLHF's PPO command with a served critic: `drive_openrlhf_critic.py FLAGS ROWS POLICY`.

FLAGS are those of the page, as JSON; ROWS has {"prompt", "response", "mask", "reward"} of token ids; POLICY is a folder
with a tokenizer. guerdon's module starts `openrlhf.cli.train_ppo_ray`, whose trainer does three of its own steps on the
rows and saves after the second; the same command once more resumes there and does the third again. Only what needs a
GPU is stood for: the actors of the policy, and by modules in the folder `stubs` vLLM and flash-attn. Prints for each
step what the policy is trained on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.path.abspath("stubs"))

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor

from guerdon.adapters import openrlhf_critic


class Policy:
    """Stands for the policy's actor, and keeps what it would be trained on."""

    def __init__(self, *_: Any) -> None:
        self.kept: list[Any] = []

    def init_model_from_pretrained(self, strategy: Any, *_: Any) -> None:
        self.folder = Path(strategy.args.ckpt.path) / "_actor"

    def execute_batch(self, method: str, data: dict[str, list[Any]], start: int, end: int) -> list[Any]:
        columns = {name: values[start:end] for name, values in data.items()}
        if method == "forward":
            return [torch.zeros(mask.shape) for mask in columns["action_mask"]]
        self.kept += columns["experience"]
        return [None] * (end - start)

    def fit(self, kl_ctl: float) -> dict[str, float]:
        return {"policy_loss": 0.0}

    def take(self) -> list[Any]:
        kept, self.kept = self.kept, []
        return kept

    def save_checkpoint(self, tag: str, **_: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "latest").write_text(tag)  # as DeepSpeed does

    def save_model(self) -> None: ...


class WithoutGpu:
    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def options(self, **_: Any) -> Any:
        return ray.remote(self.cls).options(num_cpus=0)


class Trainer(ppo_trainer.BasePPOTrainer):
    """OpenRLHF's trainer, whose samples are the rows instead of rollouts."""

    def __init__(self, pretrain: str, *groups: Any, **_: Any) -> None:
        tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: [str(ids.tolist())])
        super().__init__(*groups, tokenizer)

    def get_max_steps(self) -> int:
        return 10

    def fit(self) -> None:
        rows = json.loads(Path(self.args.data.prompt_dataset).read_text())
        told, first = [], 3 if self.args.ckpt.load_enable else 1
        for step in range(first, 4):
            status, _ = self.train_step([sample_of(row) for row in rows], step)
            (kept,) = ray.get(self.actor_model_group.async_run_method(method_name="take"))
            columns: dict[str, Any] = {"status": {k: v for k, v in status.items() if isinstance(v, float)}}
            for name in ("values", "returns"):
                numbers = [row for e in kept for row in getattr(e, name)]
                columns[name] = [
                    x[len(row["prompt"]) - 1 :][: len(row["response"])].tolist()
                    for row, x in zip(rows, numbers, strict=True)
                ]
            told.append(columns)
            self.save_logs_and_checkpoints(step)
        Path(self.args.ckpt.output_dir, f"from{first}.json").write_text(json.dumps(told))


def sample_of(row: dict[str, Any]) -> Experience:
    tokens = row["prompt"] + row["response"]
    return Experience(
        sequences=torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        action_mask=torch.tensor([([0] * len(row["prompt"]) + row["mask"])[1:]]),
        prompts=["a prompt"],
        labels=["a label"],
        images=[None],
        mm_train_inputs=[None],
        rewards=torch.tensor([row["reward"]]),
        response_length=torch.tensor([len(row["response"])]),
        truncated=torch.tensor([False]),
        total_length=torch.tensor([len(tokens)]),
        info={"reward": torch.tensor([row["reward"]])},
    )


if __name__ == "__main__":
    flags, rows_file, policy = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    ppo_actor.PolicyModelActor = WithoutGpu(Policy)
    ppo_trainer.PPOTrainer = ray.remote(Trainer)
    here = Path.cwd()
    command = ["train_ppo_ray", *flags, "--actor.model_name_or_path", policy, "--data.prompt_dataset", rows_file,
               "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "0", "--reward.remote_url", "http://unused",
               "--algo.kl.init_coef", "0", "--rollout.micro_batch_size", "2", "--ckpt.save_steps", "2",
               "--ckpt.path", f"{here}/trained", "--ckpt.output_dir", str(here)]  # fmt: skip
    os.environ["PYTHONPATH"] = f"{here}/stubs{os.pathsep}{os.environ['PYTHONPATH']}"  # for Ray's workers
    ray.init(num_cpus=4, include_dashboard=False)
    for more in ([], ["--ckpt.load_enable"]):
        sys.argv = command + more
        openrlhf_critic.main()
    print(json.dumps({"steps": [*json.loads((here / "from1.json").read_text()),
                                *json.loads((here / "from3.json").read_text())]}))  # fmt: skip
