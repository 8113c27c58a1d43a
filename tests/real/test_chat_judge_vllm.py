"""SmolLM2-135M-Instruct under vLLM as a judge in words of 200 samples, amid which guerdon's server is killed.

GUERDON_VLLM names the command `vllm` of an environment that has it. A relay between the two counts the questions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from released import MARKS, SMOLLM2

import killed_judge
from guerdon import RetryPolicy, RewardClient
from guerdon.server.chat_judge.answer_cache import FILE
from guerdon.server.chat_judge.parsing import AnswerParser, Unreadable
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ServerConfig
from guerdon.wire.chat_completions import ChatAnswer, write_messages, write_request
from killing import Kill, Restarted, forkserver
from ports import free_port
from stand_in_judge import stand_in

VLLM = os.environ.get("GUERDON_VLLM", "")
pytestmark = [*MARKS, pytest.mark.skipif(not VLLM, reason="GUERDON_VLLM names no command `vllm`")]

NUM_SAMPLES, CONCURRENCY, MODEL = 200, 8, "smollm2"
TEMPLATE = "{prompt}\n{response}\nHow good is this answer, from 0 to 9? Reply with one number."
KILLS: list[Kill] = [(point, 6) for point in (killed_judge.AMID, *killed_judge.POINTS)] + [3.0, 6.0]


@contextlib.contextmanager
def vllm(log: Path) -> Iterator[str]:
    """vLLM's server on a CPU; the URL of its API."""
    port = free_port()
    command = [VLLM, "serve", str(SMOLLM2), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(CONCURRENCY)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def test_a_real_judge_is_not_asked_twice_for_what_it_answered(tmp_path: Path) -> None:
    port = free_port()
    texts = [f"What is {i} + {i % 7}? It is {i + i % 5}." for i in range(NUM_SAMPLES)]
    prompts = [text[: text.index("?") + 2] for text in texts]

    def ask(first: int) -> tuple[np.ndarray, list[str | None]]:
        policy = RetryPolicy(timeout_s=900, tries=1_000_000, max_backoff_s=0.5, wait_for_start=True)
        some = slice(first, first + 20)
        with RewardClient(f"http://127.0.0.1:{port}", "careful", policy=policy) as client:
            scores = client.score(texts=texts[some], prompts=prompts[some])
        return scores.rewards, scores.errors

    def score() -> tuple[np.ndarray, list[str | None]]:
        with ThreadPoolExecutor(4) as threads:
            rewards, errors = zip(*threads.map(ask, range(0, NUM_SAMPLES, 20)), strict=True)
        return np.concatenate(rewards), [error for some in errors for error in some]

    with vllm(tmp_path / "vllm.log") as upstream, stand_in(upstream=upstream) as relay, forkserver():
        judge = ChatJudgeConfig(
            name="careful", url=relay.url, model=MODEL, template=TEMPLATE, cache=str(tmp_path / "answers"),
            parse=ParseConfig(regex=r"\b(\d)\b"), parse_retries=0, max_tokens=12, temperature=0.0,
            concurrency=CONCURRENCY, timeout_s=300.0,
        )  # fmt: skip
        config = ServerConfig(port=port, grpc_port=None, models=[judge])
        with Restarted(killed_judge.serve, (config,), KILLS, port) as server:
            started = time.monotonic()
            rewards, errors = score()
            seconds, counts = time.monotonic() - started, relay.counts()
            again, _ = score()
            assert relay.counts() == counts
    np.testing.assert_array_equal(rewards, again)

    lines = [orjson.loads(line) for line in (tmp_path / "answers" / FILE).read_bytes().splitlines()]
    answers = {line["key"]: ChatAnswer(line["text"], line["finish"]) for line in lines}
    assert len(lines) == len(answers) == NUM_SAMPLES
    parser, keys, num_unreadable = AnswerParser(judge.parse), {}, 0
    for text, prompt, reward, error in zip(texts, prompts, rewards, errors, strict=True):
        question = TEMPLATE.format(prompt=prompt, response=text.removeprefix(prompt))
        more = {"max_tokens": 12, "temperature": 0.0}
        body = write_request(MODEL, write_messages([{"role": "user", "content": question}]), more)
        keys[question] = hashlib.sha256(body + b"\n0.0").hexdigest()
        try:
            assert reward == parser.read(answers[keys[question]]) and error is None
        except Unreadable:
            num_unreadable += 1
            assert np.isnan(reward) and error is not None
    for line in (tmp_path / killed_judge.STARTS).read_bytes().splitlines():
        start = orjson.loads(line)
        for question, key in keys.items():
            if key in start["recorded"]:
                assert counts["asked"][question] == start["asked"][question]
    num_lost = sum(counts["asked"].values()) - NUM_SAMPLES
    assert server.num_kills and num_lost <= server.num_kills * CONCURRENCY
    print(
        f"{NUM_SAMPLES} samples in {seconds:.0f} s, {server.num_kills} kills: {num_unreadable} unreadable answers are "
        f"failed samples; {num_lost} calls in progress at a kill were asked again, no recorded answer"
    )
