"""A training step of slime's or miles' distillation from a served teacher, beside the same with the teacher in process.

    drive_distillation_step.py CHECKOUT NAME STUDENT TEACHERS ROWS SETTINGS

NAME is `slime` or `miles`, STUDENT a folder, TEACHERS an object of folders by name. ROWS has {"tokens",
"response_length", "teacher", "before"}; "before" is the teacher's own prompt, as in miles' pull request 2515. Each
sample goes through the trainer's `async_rm` and `post_process_rewards`, `apply_opd_kl_to_advantages` and
`compute_policy_loss`, and one step of gradient descent. Prints {"served", "in_process"}, each with the loss, the
gradient's norm, and the sum of the new weights' absolute changes.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from transformers import AutoModelForCausalLM

checkout, name = sys.argv[1:3]
sys.path.insert(0, checkout)
FILES = {
    "slime": ("slime/backends/megatron_utils/loss.py", "slime/utils/ppo_utils.py"),
    "miles": ("miles/backends/training_utils/loss_hub/opd.py", "miles/backends/training_utils/loss_hub/math_utils.py"),
}


def function_of(path: str, wanted: str) -> Any:
    """Returns the trainer's own function, of a module without its imports, such as Megatron's, and its classes."""
    tree = ast.parse((Path(checkout) / path).read_text())
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.Assign)]
    for node in kept:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
    names: dict[str, Any] = {"torch": torch, "logging": logging}
    exec(compile(ast.Module(kept, []), path, "exec"), names)
    return names[wanted]


def logprobs_of(model: Any, tokens: list[int], count: int) -> torch.Tensor:
    """The log-probs of the last `count` tokens."""
    logits = model(torch.tensor([tokens])).logits[0, -count - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(count), tokens[-count:]]


def ask(rows: list[dict[str, Any]], settings: dict[str, Any]) -> list[torch.Tensor]:
    """The teacher's log-probs, by the trainer's own hooks."""
    hooks = importlib.import_module(f"{name}.rollout.on_policy_distillation")
    async_rm = importlib.import_module(f"{name}.rollout.rm_hub").async_rm
    sample_of = importlib.import_module(f"{name}.utils.types").Sample
    args = SimpleNamespace(
        rm_type=None,
        custom_rm_path=f"{hooks.__name__}.reward_func",
        reward_key=None,
        rollout_temperature=1.0,
        **settings,
    )
    samples = [
        sample_of(
            tokens=[*row["before"], *row["tokens"][-row["response_length"] :]],
            response_length=row["response_length"],
            metadata={"opd_teacher": row["teacher"]},
        )
        for row in rows
    ]

    async def reward() -> None:
        for sample, told in zip(samples, await asyncio.gather(*(async_rm(args, s) for s in samples)), strict=True):
            sample.reward = told

    asyncio.run(reward())
    hooks.post_process_rewards(args, samples)
    return [sample.teacher_log_probs for sample in samples]


def step(student: str, rows: list[dict[str, Any]], teacher_log_probs: list[torch.Tensor]) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32, attn_implementation="eager")
    own = [logprobs_of(model, row["tokens"], row["response_length"]) for row in rows]
    old = [one.detach() for one in own]
    advantages = [torch.zeros_like(one) for one in old]
    args = SimpleNamespace(opd_kl_coef=1.0, opd_type="sglang", use_opd=True)
    kl_file, loss_file = FILES[name]
    batch = {"teacher_log_probs": teacher_log_probs}
    function_of(kl_file, "apply_opd_kl_to_advantages")(args, batch, advantages, old)
    ppo_kl = torch.cat(old) - torch.cat(own)
    losses, _ = function_of(loss_file, "compute_policy_loss")(ppo_kl, torch.cat(advantages), 0.2, 0.2)
    loss = losses.mean()
    loss.backward()
    before = [weight.detach().clone() for weight in model.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = sum(float((a - b).abs().sum()) for a, b in zip(model.parameters(), before, strict=True))
    return {"loss": float(loss), "grad_norm": float(norm), "moved": moved}


def drive(student: str, teachers: dict[str, str], rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    models = {
        key: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for key, folder in teachers.items()
    }
    with torch.no_grad():
        expected = [
            logprobs_of(models[row["teacher"]], [*row["before"], *row["tokens"][-count:]], count)
            for row in rows
            for count in [row["response_length"]]
        ]
    served = ask(rows, settings)
    return {"served": step(student, rows, served), "in_process": step(student, rows, expected)}


if __name__ == "__main__":
    rows = json.loads(Path(sys.argv[5]).read_text())
    print(json.dumps(drive(sys.argv[3], json.loads(sys.argv[4]), rows, json.loads(sys.argv[6]))))
