"""What runs of actors in tests share: a tiny policy, its prompts, and quick settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import zoo
from guerdon.actor import distill, ppo, reinforce
from guerdon.settings.actors import ActorConfig, DataConfig, PolicyConfig, RolloutConfig, RunConfig, get_algorithm

WORDS = ("the", "inn", "on", "a", "her", "thin", "tea", "rest")


def tiny_policy(folder: Path) -> Path:
    """A random Llama with its tokenizer, and 40 short prompts in `prompts.jsonl` beside it."""
    zoo.tokenizer(zoo.language_model("llama", folder / "policy"))
    rows = [{"prompt": " ".join(WORDS[(i + j * j) % 8] for j in range(2 + i % 5)) + f" {i}"} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def loop_of(config: ActorConfig) -> Any:
    """The function that trains with these settings."""
    return {"reinforce": reinforce.train, "ppo": ppo.train, "distill": distill.train}[get_algorithm(config)[0]]


def parts(folder: Path, out: Path, *, steps: int, rollouts: dict[str, Any] | None = None, **policy: Any) -> Any:
    """The sections policy, data, rollouts and run of a config."""
    sampling = {"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 8, **(rollouts or {})}
    return {
        "policy": PolicyConfig(model=str(folder / "policy"), **{"learning_rate": 3e-3, **policy}),
        "data": DataConfig(prompts=str(folder / "prompts.jsonl"), num_validation=4),
        "rollouts": RolloutConfig(**sampling),
        "run": RunConfig(steps=steps, output_dir=str(out), validate_every=10, num_samples=0, progress=False),
    }


def without_curves(patch: pytest.MonkeyPatch) -> None:
    """Lets runs leave an empty file for their curves: to draw them takes longer than a few steps of a tiny policy."""
    patch.setattr("guerdon.actor.training_run.save_curves", lambda rows, path, title: path.touch())


def metrics_of(out: Path) -> list[dict[str, float]]:
    """What was logged for each step, from step 1."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def weights_of(out: Path, step: int) -> dict[str, Tensor]:
    """The policy's weights in the checkpoint after that step."""
    return load_file(out / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors")
