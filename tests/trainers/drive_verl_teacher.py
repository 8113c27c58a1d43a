"""verl's on-policy distillation from a served teacher: `drive_verl_teacher.py FLAGS ROWS TOKENIZER`.

The flags are those of the page's command, the trainer one without its own `__init__`, which needs GPUs: it sets GPUs
apart, its teachers' clients go through pickle as Ray sends them, and verl's rollout worker asks them about each row.
Prints {"gpus", "ids", "log_probs"}, of whole rows.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

from hydra import compose, initialize_config_module
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
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
    print(json.dumps(drive(json.loads(sys.argv[1]), rows, sys.argv[3])))
