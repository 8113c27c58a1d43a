"""Asks a server for the same sequences alone and in random company, and counts answers that have other bits.

  python benchmarks/soak_bits.py [--rewards 30000] [--logprobs 200000]      exit status 1 if one differs

A reward model and a teacher, small and random, are served by processes with one and with two threads, and with the
processor's own instructions and with AVX2's. Of each instruction set the first server answers for every sequence alone;
every server's later answers are compared with these. Requests have random members, of one prompt or of several, and
random forms; random numbers of them are in flight. The teacher's vocabulary is so large that PyTorch splits sums of a
single row among threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from guerdon.client import AsyncRewardClient, AsyncTeacherClient, RetryPolicy
from report import machine
from workload import make_tokenizer

PROMPTS, RESPONSES, VOCABULARY = 50, 4, 33_000
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
INSTRUCTIONS: dict[str, dict[str, str]] = {
    "the processor's own": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
THREADS = {1: 8192, 2: 512}
"""Each server's number of threads, and its tokens a batch."""
IN_FLIGHT = (1, 4, 16, 64)
MOST_MEMBERS = 12
TRIES = 5
PATIENT = RetryPolicy(timeout_s=600)
_TEXT = "the reward of a good answer is what is left when one takes away all that nobody had asked for"


@dataclass(frozen=True)
class Sample:
    """A sequence as text and as ids; the first `start` ids are the prompt's."""

    prompt: str
    response: str
    tokens: np.ndarray
    start: int


@dataclass
class Found:
    """What was compared, by form: how many numbers, and how many had other bits."""

    compared: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)

    def compare(self, form: str, got: Any, want: np.ndarray) -> int:
        """Counts numbers of float32 or int32 with other bits than wanted; returns how many there are."""
        got = np.asarray(got, want.dtype)
        assert got.shape == want.shape, (form, got.shape, want.shape)
        self.compared[form] += want.size
        self.different[form] += int((got.view(np.int32) != want.view(np.int32)).sum())
        return want.size


def make(folder: Path) -> list[Sample]:
    """Writes the two models and returns the samples, RESPONSES to each of the PROMPTS."""
    random = np.random.default_rng(0)

    def words(least: int, most: int) -> str:
        return " ".join(random.choice(_TEXT.split(), random.integers(least, most)))

    groups = [(words(10, 90) + "?", [" " + words(1, 40) for _ in range(RESPONSES)]) for _ in range(PROMPTS)]
    tokenizer = make_tokenizer([prompt + text for prompt, texts in groups for text in texts])
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, kind, size in (
        ("rewards", AutoModelForSequenceClassification, len(tokenizer)),
        ("teacher", AutoModelForCausalLM, VOCABULARY),
    ):
        torch.manual_seed(0)
        model = kind.from_config(LlamaConfig(vocab_size=size, num_labels=1, **ids, **SHAPE))
        with torch.no_grad():
            for place, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.5 if "embed" in place else 0.15)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return [
        Sample(prompt, text, np.array(tokenizer(prompt + text)["input_ids"]), len(tokenizer(prompt)["input_ids"]))
        for prompt, texts in groups
        for text in texts
    ]


@contextlib.asynccontextmanager
async def serving(folder: Path, threads: int, variables: dict[str, str]) -> AsyncIterator[tuple[str, str]]:
    """Runs a server of both models; yields its addresses for HTTP and gRPC."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, grpc_port = (listener.getsockname()[1] for listener in free)
    common = {"max_batch_tokens": THREADS[threads]}
    models = [
        {"name": "rewards", "model": str(folder / "rewards"), **common},
        {"kind": "teacher", "name": "teacher", "model": str(folder / "teacher"), **common},
    ]
    settings = folder / "server.yaml"
    settings.write_text(yaml.safe_dump({"port": port, "grpc_port": grpc_port, "models": models}))
    command = [sys.executable, "-m", "guerdon", "serve", "--config", str(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(*command, env=environment, stdout=quiet)
    try:
        url = f"http://127.0.0.1:{port}"
        async with AsyncRewardClient(url, model="rewards", policy=PATIENT) as client:
            await client.wait_ready(120)
        yield url, f"grpc://127.0.0.1:{grpc_port}"
    finally:
        server.terminate()
        await server.wait()


class Asker:
    """Asks one server, and compares its answers with those in `alone`."""

    def __init__(self, samples: list[Sample], alone: dict[str, list[Any]], found: Found, seed: int) -> None:
        self._samples, self._alone, self._found = samples, alone, found
        self._random = np.random.default_rng(seed)

    async def connect(self, stack: contextlib.AsyncExitStack, url: str, grpc_url: str) -> None:
        """Opens the clients."""
        enter = stack.enter_async_context
        binary = await enter(AsyncRewardClient(url, model="rewards", policy=PATIENT))
        grpc = await enter(AsyncRewardClient(grpc_url, model="rewards", policy=PATIENT))
        self._http = await enter(httpx.AsyncClient(base_url=url, timeout=600))
        self._teachers = {
            form: await enter(AsyncTeacherClient(address, model="teacher", policy=PATIENT))
            for form, address in (("KServe v2, binary", url), ("gRPC", grpc_url))
        }
        self._forms: dict[str, Callable[[list[Sample]], Awaitable[Any]]] = {
            "KServe v2, binary: tokens": lambda some: _by_tokens(binary, some),
            "KServe v2, binary: texts": lambda some: _by_texts(binary, some),
            "gRPC: tokens": lambda some: _by_tokens(grpc, some),
            "/reward": self._reward,
            "/classify": lambda some: self._listed("/classify", "probs", some),
            "/pooling": lambda some: self._listed("/pooling", "data", some),
        }

    async def ask_alone(self) -> None:
        """Asks about each sample by itself, one request after the other, and keeps the answers."""
        ask, teacher = self._forms["KServe v2, binary: tokens"], self._teachers["KServe v2, binary"]
        for sample in self._samples:
            self._alone["rewards"].append((await ask([sample]))[0])
            said = await teacher.top(3, tokens=[sample.tokens], entropy=True)
            said.raise_for_failed()
            self._alone["logprobs"].append([table[0] for table in _tables(said)])

    async def ask_in_company(self, rewards: int, logprobs: int) -> None:
        """Asks until so many numbers were compared."""
        left = {"rewards": rewards, "logprobs": logprobs}

        async def worker() -> None:
            while any(number > 0 for number in left.values()):
                what = self._random.choice([name for name, number in left.items() if number > 0])
                compared = await (self._ask_rewards() if what == "rewards" else self._ask_logprobs())
                left[what] -= compared  # read after the wait: others count meanwhile
                if self._random.random() < 0.1:
                    return  # the next round has another number in flight

        while any(number > 0 for number in left.values()):
            await asyncio.gather(*(worker() for _ in range(self._random.choice(IN_FLIGHT))))

    async def _ask_rewards(self) -> int:
        form, members = self._random.choice([*self._forms]), self._members()
        got = await self._forms[form]([self._samples[i] for i in members])
        return self._found.compare(form, got, np.array([self._alone["rewards"][i] for i in members], np.float32))

    async def _ask_logprobs(self) -> int:
        """Asks for all of a row's log-probs, for the response's, or for the last one alone."""
        form, members = self._random.choice([*self._teachers]), self._members()
        some = [self._samples[i] for i in members]
        starts = [int(self._random.choice([1, sample.start, len(sample.tokens) - 1])) for sample in some]
        tokens = [sample.tokens for sample in some]
        said = await self._teachers[form].top(3, tokens=tokens, prompt_lengths=starts, entropy=True)
        said.raise_for_failed()
        compared = 0
        for i, (member, start) in enumerate(zip(members, starts, strict=True)):
            names = ("log-probs", "entropies", "top ids", "top log-probs")
            for name, table, want in zip(names, _tables(said), self._alone["logprobs"][member], strict=True):
                count = self._found.compare(f"{form}: {name}", table[i], want[start - 1 :])
                compared += count * (name == "log-probs")
        return compared

    def _members(self) -> list[int]:
        """Draws any samples, or responses to one prompt, in any order and some of them twice."""
        if self._random.random() < 0.5:
            return self._random.integers(0, len(self._samples), self._random.integers(1, MOST_MEMBERS)).tolist()
        first = RESPONSES * int(self._random.integers(0, PROMPTS))
        return (first + self._random.integers(0, RESPONSES, self._random.integers(1, 2 * RESPONSES))).tolist()

    async def _reward(self, some: list[Sample]) -> list[float]:
        """Asks for one sample a request, all at once."""
        bodies = [{"prompt": sample.prompt, "response": sample.response} for sample in some]
        return await asyncio.gather(*(self._post("/reward", body) for body in bodies))

    async def _listed(self, path: str, key: str, some: list[Sample]) -> list[float]:
        texts = [sample.prompt + sample.response for sample in some]
        body = {"model": "rewards", "input": texts, "use_activation": False}
        return [row[key][0] for row in (await self._post(path, body))["data"]]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        for number in range(TRIES):
            with contextlib.suppress(*([httpx.TransportError] if number < TRIES - 1 else [])):  # an idle one was closed
                return (await self._http.post(path, json=body)).raise_for_status().json()
        raise AssertionError


async def _by_tokens(client: AsyncRewardClient, some: list[Sample]) -> Any:
    return (await client.score(tokens=[sample.tokens for sample in some])).raise_for_failed().rewards


async def _by_texts(client: AsyncRewardClient, some: list[Sample]) -> Any:
    texts, prompts = [sample.prompt + sample.response for sample in some], [sample.prompt for sample in some]
    return (await client.score(texts=texts, prompts=prompts)).raise_for_failed().rewards


def _tables(said: Any) -> tuple[list[np.ndarray], ...]:
    return said.logprobs, said.entropy, said.top_ids, said.top_logprobs


async def run(args: argparse.Namespace) -> dict[str, Found]:
    """Returns what was compared, by server."""
    samples, everything = make(args.out), {}
    for name, variables in INSTRUCTIONS.items():
        alone: dict[str, list[Any]] = {"rewards": [], "logprobs": []}
        for threads in THREADS:
            found = everything[f"{name}, threads: {threads}"] = Found()
            async with serving(args.out, threads, variables) as addresses, contextlib.AsyncExitStack() as stack:
                asker = Asker(samples, alone, found, seed=threads)
                await asker.connect(stack, *addresses)
                if not alone["rewards"]:
                    await asker.ask_alone()
                    assert len(set(alone["rewards"])) > len(samples) // 2
                await asker.ask_in_company(args.rewards // len(THREADS), args.logprobs // len(THREADS))
            compared, different = found.compared.total(), found.different.total()
            print(f"{name}, threads: {threads}: {different:,} of {compared:,} differ", file=sys.stderr, flush=True)
    return everything


def table(everything: dict[str, Found]) -> str:
    """Returns how many numbers differ of how many, by form and server."""
    lines = [f"| numbers that differ | {' | '.join(everything)} |", "| --- |" + " --- |" * len(everything)]
    for form in sorted(set().union(*(found.compared for found in everything.values()))):
        cells = [f"{found.different[form]:,} of {found.compared[form]:,}" for found in everything.values()]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rewards", type=int, default=30_000, help="for each instruction set (default: 30000)")
    parser.add_argument("--logprobs", type=int, default=200_000, help="for each instruction set (default: 200000)")
    parser.add_argument("--out", type=Path, default=Path("out/soak_bits"), help="folder of the models")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    everything = asyncio.run(run(args))
    print(" · ".join(machine().values()))
    print(f"\n{table(everything)}")
    sys.exit(any(found.different.total() for found in everything.values()))


if __name__ == "__main__":
    main()
