"""How slime and miles ask a teacher: `drive_slime_teacher.py CHECKOUT NAME TEACHER STUDENT ROWS SETTINGS`.

NAME is `slime` or `miles`, TEACHER the teacher's URL and STUDENT host:port of what stands for miles' router of rollout
servers. ROWS has {"tokens", "response_length", "top"}, SETTINGS the flags. Each sample goes through `async_rm` and the
hook of `--custom-reward-post-process-path`. Prints {"log_probs": [...], "reverse_kl": [...], "rewards": [...]}.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

checkout, name = sys.argv[1:3]
sys.path.insert(0, checkout)

hooks = f"{name}.rollout.on_policy_distillation"
async_rm = importlib.import_module(f"{name}.rollout.rm_hub").async_rm
load_function = importlib.import_module(f"{name}.utils.misc").load_function
Sample = importlib.import_module(f"{name}.utils.types").Sample


async def drive(teacher: str, student: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    host, _, port = student.partition(":")
    args = SimpleNamespace(
        rm_url=teacher,
        rm_type=None,
        custom_rm_path=f"{hooks}.reward_func",
        reward_key=None,
        rollout_temperature=0.7,
        sglang_router_ip=host,
        sglang_router_port=port,
        **settings,
    )
    samples = [
        Sample(
            tokens=row["tokens"],
            response_length=row["response_length"],
            metadata={"opd_student_top_logprobs": row.get("top"), "opd_teacher": row.get("teacher")},
        )
        for row in rows
    ]
    for sample, reward in zip(samples, await asyncio.gather(*(async_rm(args, s) for s in samples)), strict=True):
        sample.reward = reward
    raw, rewards = load_function(f"{hooks}.post_process_rewards")(args, samples)
    assert raw == rewards
    told = {"log_probs": "teacher_log_probs", "reverse_kl": "opd_reverse_kl"}
    found = {key: [getattr(sample, field, None) for sample in samples] for key, field in told.items()}
    return {key: [None if x is None else x.tolist() for x in values] for key, values in found.items()} | {
        "rewards": rewards
    }


if __name__ == "__main__":
    with open(sys.argv[5]) as file:
        rows = json.load(file)
    print(json.dumps(asyncio.run(drive(sys.argv[3], sys.argv[4], rows, json.loads(sys.argv[6])))))
