"""verl's on-policy distillation from a served teacher: `drive_verl_teacher.py FLAGS ROWS TOKENIZER [TEACHERS]`.

The flags are those of the page's command, the trainer one without its own `__init__`, which needs GPUs: it sets GPUs
apart, its teachers' clients go through pickle as Ray sends them, and verl's rollout worker asks them about each row.
Prints {"gpus", "ids", "log_probs"}, of whole rows.

With TEACHERS, an object of folders by name, TOKENIZER is the student's folder too, and a row's "student_tokens" are its
own prompt and response. Then it also prints loss and gradient norm, by verl's `kl_penalty` and `agg_loss`, for
the served log-probs and for those of the teachers in process: {"served", "in_process"}.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

import torch
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.utils import Role, need_teacher_policy
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

from guerdon.adapters.verl_teacher import use_teacher_servers


def drive(flags: list[str], rows: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*flags, f"actor_rollout_ref.model.path={folder}"])
    use_teacher_servers()
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer.config = config
    assert need_teacher_policy(config)
    trainer._init_resource_pool_mgr()
    manager = trainer.resource_pool_manager
    manager.resource_pool_dict = dict.fromkeys(manager.resource_pool_spec)
    pool = manager.get_resource_pool(Role.TeacherModel)
    teachers = trainer_base.MultiTeacherModelManager(config=config, resource_pool=pool)
    clients = pickle.loads(pickle.dumps(teachers.get_client()))  # noqa: S301 - our own
    worker = AgentLoopWorker(config, llm_client=None, teacher_client=clients)
    outputs = asyncio.run(ask(worker, rows))
    return {
        "gpus": manager.get_n_gpus(),
        "ids": [output.extra_fields["teacher_ids"].tolist() for output in outputs],
        "log_probs": [output.extra_fields["teacher_logprobs"].tolist() for output in outputs],
    }


def step(folder: str, rows: list[dict[str, Any]], teacher: list[torch.Tensor]) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    own = [logprobs_of(model, row["student_tokens"], row["response_length"]) for row in rows]
    pad: Any = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(one) for one in own], batch_first=True).detach()
    losses = kl_penalty(pad(own, batch_first=True), pad(teacher, batch_first=True), "k2")
    loss = agg_loss(losses, mask, "token-mean")
    loss.backward()
    return {"loss": float(loss), "grad_norm": float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))}


def logprobs_of(model: Any, tokens: list[int], count: int) -> torch.Tensor:
    """The log-probs of the last `count` tokens."""
    logits = model(torch.tensor([tokens])).logits[0, -count - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(count), tokens[-count:]]


def both_steps(told: dict[str, Any], rows: list[dict[str, Any]], student: str, teachers: dict[str, str]) -> None:
    """Adds a step by the log-probs that verl's worker has, and one by those in process."""
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in teachers.items()}
    with torch.no_grad():
        expected = [logprobs_of(models[row["teacher"]], row["tokens"], row["response_length"]) for row in rows]
    # Row t is about token t + 1.
    pairs = zip(told["log_probs"], rows, strict=True)
    served = [torch.tensor(one)[-1 - row["response_length"] : -1, 0] for one, row in pairs]
    told |= {"served": step(student, rows, served), "in_process": step(student, rows, expected)}


async def ask(worker: AgentLoopWorker, rows: list[dict[str, Any]]) -> list[AgentLoopOutput]:
    outputs = []
    for row in rows:
        start = len(row["tokens"]) - row["response_length"]
        prompt, response = row["tokens"][:start], row["tokens"][start:]
        outputs.append(
            AgentLoopOutput(
                prompt_ids=prompt, response_ids=response, response_mask=[1] * len(response), metrics=AgentLoopMetrics()
            )
        )
    about = [{"data_source": row.get("teacher", "any")} for row in rows]
    await asyncio.gather(
        *(
            worker._compute_teacher_logprobs(o, o.prompt_ids, o.response_ids, validate=False, sample_kwargs=sample)
            for o, sample in zip(outputs, about, strict=True)
        )
    )
    return outputs


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        rows = json.load(file)
    told = drive(json.loads(sys.argv[1]), rows, sys.argv[3])
    if len(sys.argv) > 4:
        both_steps(told, rows, sys.argv[3], json.loads(sys.argv[4]))
    print(json.dumps(told))
