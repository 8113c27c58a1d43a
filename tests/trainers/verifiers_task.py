"""A taskset of verifiers with a reward by a served model: ROWS is the file of its tasks, REWARDS the server."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf

from guerdon.adapters.verifiers import reward_function

ask = reward_function(os.environ["REWARDS"], "total", timeout_s=20)


class Data(vf.TaskData):
    answer: str | None = None


class Task(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def helpful(self, task: Data, trace: vf.Trace) -> float:
        return await ask(task, trace)


class Tasks(vf.Taskset[Task]):
    def load(self) -> Iterable[Task]:
        for row in json.loads(Path(os.environ["ROWS"]).read_text()):
            yield Task(Data(prompt=row["prompt"], answer=row.get("answer")))


class Chat(vf.Harness[vf.HarnessConfig]):
    """Sends the prompt once, in this process: verifiers' own chat program needs uv."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Chat", "Tasks"]
