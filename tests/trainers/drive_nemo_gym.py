"""Runs NeMo Gym against a server: its head server, its simple agent as its own process, and its rollout collection.

    python drive_nemo_gym.py HOST PORT ROWS FOLDER

ROWS is a file of Gym's rows as JSON; each tells the stub of a policy by `says` what it answers, of a list one after
the other. Prints Gym's results, what it wrote into its files, and its own aggregate metrics of the same results.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

host, port, rows_file, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
rows = json.loads(rows_file.read_text())
says = {row["responses_create_params"]["input"][-1]["content"]: row["says"] for row in rows}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Policy(BaseHTTPRequestHandler):
    """Answers OpenAI's Responses API with what the row of the last message says."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = asked["input"][-1]["content"]
        text = says[content if isinstance(content, str) else content[0]["text"]]
        text = text.pop(0) if isinstance(text, list) else text
        message = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
        message["content"] = [{"type": "output_text", "text": text, "annotations": []}]
        thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "not scored"}]}
        answer: dict[str, Any] = {"id": "resp", "created_at": 0, "model": "stub", "object": "response"}
        answer |= {"output": [thought, message], "parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        answer["usage"] = {"input_tokens": 3, "output_tokens": len(text), "total_tokens": 3 + len(text)}
        answer["usage"] |= {"input_tokens_details": {"cached_tokens": 0}}
        answer["usage"] |= {"output_tokens_details": {"reasoning_tokens": 0}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


policy = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
threading.Thread(target=policy.serve_forever, daemon=True).start()
head, agent = {"host": "127.0.0.1", "port": free_port()}, {"host": "127.0.0.1", "port": free_port()}
config = {
    "head_server": head,
    "dry_run": False,
    "guerdon": {
        "resources_servers": {"guerdon": {"host": host, "port": port, "entrypoint": "app.py", "domain": "other"}}
    },
    "policy_model": {
        "responses_api_models": {
            "stub": {"host": "127.0.0.1", "port": policy.server_address[1], "entrypoint": "app.py"}
        }
    },
    "simple_agent": {
        "responses_api_agents": {
            "simple_agent": {
                **agent,
                "entrypoint": "app.py",
                "resources_server": {"type": "resources_servers", "name": "guerdon"},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
            }
        }
    },
}
os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(config)

import responses_api_agents.simple_agent  # noqa: E402
from nemo_gym.global_config import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME  # noqa: E402
from nemo_gym.reward_profile import compute_aggregate_metrics  # noqa: E402
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper  # noqa: E402
from nemo_gym.server_utils import HeadServer  # noqa: E402

assert NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME in os.environ
HeadServer.run_webserver()
agents_folder = Path(responses_api_agents.simple_agent.__file__).parent
with (folder / "agent.log").open("wb") as log:
    process = subprocess.Popen(
        [sys.executable, "app.py"],
        cwd=agents_folder,
        env={**os.environ, NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME: "simple_agent"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
try:
    ends = time.monotonic() + 240
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{agent['port']}/", timeout=5)
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < ends, (folder / "agent.log").read_text()[-3000:]
            time.sleep(0.2)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / "rollouts.jsonl"
    asked = RolloutCollectionConfig(
        agent_name="simple_agent",
        input_jsonl_fpath=str(folder / "rows.jsonl"),
        output_jsonl_fpath=str(output),
        num_repeats=2,
        upload_rollouts_to_wandb=False,
    )
    results = asyncio.run(RolloutCollectionHelper().run_from_config(asked))
finally:
    process.terminate()
    process.wait(30)


def lines_of(name: str) -> list[Any]:
    file = folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


good = lines_of("rollouts.jsonl")
print(
    json.dumps(
        {
            "results": results,
            "good": good,
            "failed": lines_of("rollouts_failures.jsonl"),
            "metrics": json.loads((folder / "rollouts_aggregate_metrics.json").read_text()),
            "gym": compute_aggregate_metrics(good).model_dump(mode="json"),
        }
    )
)
os._exit(0)  # the head server's thread would keep the process
