"""prime-rl's on-policy distillation: `drive_prime_rl_teacher.py CHECKOUT URL ROWS`, the URL with `/v1`.

`OPDAlgorithm` connects to the teacher, which checks `/health` and `/v1/models`, and scores each row as one branch of a
trace. Prints {"log_probs": [...]}: of the sampled tokens of each row.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

sys.path.insert(0, f"{sys.argv[1]}/src")
sys.path.insert(0, f"{sys.argv[1]}/packages/prime-rl-configs/src")

import verifiers.v1 as vf
from prime_rl.configs.algorithm import OPDAlgoConfig
from prime_rl.orchestrator.algo.opd import OPDAlgorithm
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage


async def drive(url: str, rows: list[dict[str, Any]]) -> list[list[float]]:
    algorithm = OPDAlgorithm(OPDAlgoConfig(teacher={"name": "teacher", "base_url": url}), policy_pool=None)
    await algorithm.setup()
    traces = [trace_of(row) for row in rows]
    await algorithm.finalize_episode(
        vf.Episode(env=vf.EnvInfo(id="test", name="test"), task=traces[0].task, traces=traces)
    )
    return [trace.nodes[-1].reference_logprobs for trace in traces]


def trace_of(row: dict[str, Any]) -> vf.Trace:
    start = len(row["tokens"]) - row["response_length"]
    prompt, response = row["tokens"][:start], row["tokens"][start:]
    nodes = [
        MessageNode(message=UserMessage(content="U"), token_ids=prompt, mask=[False] * len(prompt)),
        MessageNode(
            parent=0,
            message=AssistantMessage(content="A"),
            sampled=True,
            token_ids=response,
            mask=[True] * len(response),
            logprobs=[0.0] * len(response),
        ),
    ]
    task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt=None))
    return vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, rewards={}, ok=True)


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        print(json.dumps({"log_probs": asyncio.run(drive(sys.argv[2], json.load(file)))}))
