"""Schemathesis over the document that a real server publishes: every path, with what it takes and what it does not.

    PYTHONPATH=src:tests python tests/fuzz/served_openapi.py --examples 200

A server of a reward model, a function, a sum and a critic, with a key, in this process; schemathesis beside it. Ends
with 1 where an answer was a fault of the server, or not what the document says.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

import served
from guerdon.assembly import build_service
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, CriticConfig, ModelConfig, RewardConfig, ServerConfig

KEY = "a-key-for-the-fuzzers-of-this-server"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
_CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501]
"""
"""501 is the right answer to a part of the protocol that this server has not, such as weights by NCCL."""
_GROWTH = 1.05


def fuzz(examples: int, seed: int = 1) -> tuple[int, bool]:
    """How many requests were sent, and whether all were answered as they should be; prints what was not."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder))
        with RunningServer(build_service(config), config) as server:
            settings = Path(folder) / "schemathesis.toml"
            settings.write_text(_CONFIG, encoding="utf-8")
            print(f"a first round of requests, to warm up, to {server.http_url}", flush=True)
            _run(server.http_url, settings, max(2, examples // 10), seed + 1, "--exclude-path=/sleep")
            before, started = psutil.Process().memory_info().rss, time.monotonic()
            passed = _run(server.http_url, settings, examples, seed, "--exclude-path=/sleep")
            # Last, and alone: whatever is asked of a model that is asleep is answered with 503.
            passed = _run(server.http_url, settings, examples, seed, "--include-path=/sleep") and passed
            took_s, after = time.monotonic() - started, psutil.Process().memory_info().rss
            counted = _requests(server.http_url)
    print(f"{counted} requests, {took_s:.0f} s; RSS {before >> 20} MiB, then {after >> 20} MiB")
    if after > before * _GROWTH:
        print(f"the server grew by more than {_GROWTH - 1:.0%}")
    return counted, passed and after <= before * _GROWTH


def _config(folder: Path) -> ServerConfig:
    keys = folder / "keys"
    keys.write_text(f"train fuzz {KEY}\n", encoding="utf-8")
    model = str(served.reward_model(folder / "rm"))
    models = [ModelConfig(model=model, name="helpful"), ModelConfig(model="served:agreement", name="agreement")]
    parts = [ComponentConfig(model="helpful"), ComponentConfig(model="agreement")]
    critic = CriticConfig(model=model, checkpoint_dir=str(folder / "checkpoints"))
    config = ServerConfig(port=0, grpc_port=None, models=models, rewards=[RewardConfig("total", parts)], critic=critic)
    config.api_keys_file, config.log_level = str(keys), "error"
    return config


def _run(url: str, settings: Path, examples: int, seed: int, which: str) -> bool:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)]
    command += ["run", f"{url}/openapi.json", which]
    command += ["--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS)]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--mode", "all", "--continue-on-failure"]
    command += ["--phases", "examples,coverage,fuzzing", "--workers", "1", "--request-timeout", "30", "--no-color"]
    command += ["--suppress-health-check", "all"]
    return subprocess.run(command, check=False).returncode == 0


def _requests(url: str) -> int:
    metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    counted = re.findall(r"^guerdon_client_requests_total\{.*\} (.*)$", metrics, re.MULTILINE)
    return int(sum(map(float, counted)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200, help="for each operation, beside the systematic ones")
    _, passed = fuzz(parser.parse_args().examples)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
