"""Measures what the choices of the CPU path rest on, on your machine; each `what` prints a table.

  python benchmarks/cpu_path.py dtypes     sequences/s, and how far rewards are from float32's: bfloat16, int8 (dynamic
                                           quantisation), float32 with products in bfloat16
  python benchmarks/cpu_path.py memory     sequences/s and page faults if malloc keeps freed memory, and by glibc's
                                           default; on the main thread and on another, as in a server
  python benchmarks/cpu_path.py threads    sequences/s by number of torch's threads, alone and beside another busy
                                           Python thread
  python benchmarks/cpu_path.py devices    milliseconds of a request to each of two equal models and to their sum: both
                                           models on `cpu` with half of the cores, with all, and on `cpu:0` and `cpu:1`

Text in the shape of RLHF scoring, and by default a random Llama; `--model` takes any reward model's folder, such as the
one that `make demo` trains. Forms alternate; medians over the rounds are printed. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from guerdon.assembly import build_scorer, build_service
from guerdon.core import ScoreRequest, Sequence
from guerdon.server.service import Service
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from report import machine
from workload import DEMO_PROMPTS, MAX_LENGTH, make_models, read_groups

GLIBC_RULE = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_ARENA_MAX": str(8 * (os.cpu_count() or 1)),
}
"""glibc's own values once large blocks have been freed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TABLES, "child"], metavar="{" + ",".join(TABLES) + "}")
    parser.add_argument("--model", type=Path, help="a reward model's folder (default: the benchmarks' random Llama)")
    parser.add_argument("--data", type=Path, default=DEMO_PROMPTS, help="JSONL")
    parser.add_argument("--prompts", type=int, default=8, help="prompts with all their responses (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all forms (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("out/bench-cpu-path"), help="folder of random models")
    parser.add_argument("--thread", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    args.model = args.model or random_model(args)
    if args.what == "child":
        child(args)
        return
    about = machine()
    print(f"{about['date']}, commit {about['commit']}, {about['hardware']}, {torch.get_num_threads()} threads.\n")
    TABLES[args.what](args)


def random_model(args: argparse.Namespace) -> Path:
    folder = args.out / "model"
    return folder if folder.exists() else make_models(args.out, read_groups(args.data, args.prompts))


def read(args: argparse.Namespace) -> list[list[Sequence]]:
    """Returns the sequences of each prompt, cut to the model's maximum."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    groups = read_groups(args.data, args.prompts)
    return [[Sequence(np.array(tokenizer(text)["input_ids"][:MAX_LENGTH])) for text in group] for group in groups]


def medians(forms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the seconds of each form; the forms alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, run in forms.items():
            started = time.perf_counter()
            run()
            if number:  # the first is to warm up
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(head: str, rows: list[str]) -> None:
    print(f"| {head} |\n|{' --- |' * (head.count('|') + 1)}")
    print("\n".join(f"| {row} |" for row in rows) + "\n")


# ------------------------------------------------------------------------------------------------------- dtypes


class InBfloat16(nn.Module):
    """A linear layer of a float32 model that computes its product in bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight).float()


def dtypes(args: argparse.Namespace) -> None:
    groups = read(args)
    sequences = [s for group in groups for s in group]
    engines = {
        dtype: build_scorer(ModelConfig(model=str(args.model), dtype=dtype)) for dtype in ("float32", "bfloat16")
    }
    torch.backends.quantized.engine = "onednn"  # the quicker one where there is AMX
    engines["int8, dynamic"] = build_scorer(ModelConfig(model=str(args.model)))
    torch.ao.quantization.quantize_dynamic(engines["int8, dynamic"].trunk, {nn.Linear}, inplace=True)
    engines["float32, products in bfloat16"] = mixed = build_scorer(ModelConfig(model=str(args.model)))
    for parent in list(mixed.trunk.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(parent, name, InBfloat16(child))
    took = medians({name: lambda e=e: e.score(sequences) for name, e in engines.items()}, args.rounds)
    reference = np.array([s.reward for s in engines["float32"].score_plainly(sequences)])
    starts = np.cumsum([0, *map(len, groups)])
    pairs = [p for a, b in itertools.pairwise(starts) for p in itertools.combinations(range(a, b), 2)]
    first, second = np.array(pairs).T
    within = np.mean([reference[a:b].std() for a, b in itertools.pairwise(starts)])
    rows = []
    for name, engine in engines.items():
        rewards = np.array([s.reward for s in engine.score(sequences)])
        off = np.abs(rewards - reference)
        same = np.mean((rewards[first] > rewards[second]) == (reference[first] > reference[second]))
        best = np.mean([rewards[a:b].argmax() == reference[a:b].argmax() for a, b in itertools.pairwise(starts)])
        rows.append(
            f"{name} | {len(sequences) / took[name]:.1f} | {off.max() / reference.std():.1e} | "
            f"{off.max() / within:.1e} | {same:.1%} | {best:.0%}"
        )
    head = (
        "dtype | sequences/s | largest difference / std | / std within a prompt | pairs in order | same best response"
    )
    table(head, rows)


# ------------------------------------------------------------------------------------------------------- memory


def memory(args: argparse.Namespace) -> None:
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for where, (form, environment) in itertools.product(
            ["main", "another"], [("kept", {}), ("glibc's rule", GLIBC_RULE)]
        ):
            command = [sys.executable, __file__, "child", "--model", args.model, "--data", args.data]
            command += ["--prompts", str(args.prompts), *(["--thread"] if where == "another" else [])]
            told = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
            found.setdefault((where, form), []).append(json.loads(told.stdout.splitlines()[-1]))
    kinds = ("rate", "cpu_s", "faults", "resident_mib")
    table(
        "thread | freed memory | sequences/s | processor's seconds | page faults | resident MiB",
        [
            " | ".join([*key, *(f"{statistics.median(x[kind] for x in told):.1f}" for kind in kinds)])
            for key, told in found.items()
        ],
    )


def child(args: argparse.Namespace) -> None:
    sequences = [s for group in read(args) for s in group]
    engine = build_scorer(ModelConfig(model=str(args.model)))

    def measure() -> None:
        engine.score(sequences)
        before, started, used = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), time.process_time()
        for _ in range(3):
            engine.score(sequences)
        rate = 3 * len(sequences) / (time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults = (after.ru_minflt - before.ru_minflt) / 3
        told = {"rate": rate, "cpu_s": (time.process_time() - used) / 3, "faults": faults}
        print(json.dumps(told | {"resident_mib": after.ru_maxrss / 1024}))

    if not args.thread:
        measure()
        return
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()


# ------------------------------------------------------------------------------------------------------ threads


@contextmanager
def busy() -> Any:
    """Runs a Python thread that is busy for a third of the time, like a server's loop under load."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            time.sleep(0.002)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def threads(args: argparse.Namespace) -> None:
    sequences = [s for group in read(args) for s in group]
    engine = build_scorer(ModelConfig(model=str(args.model)))

    def scoring(count: int, beside: bool) -> None:
        torch.set_num_threads(count)
        if not beside:
            engine.score(sequences)
            return
        with busy():
            engine.score(sequences)

    counts = sorted({1, max(1, torch.get_num_threads() - 1), torch.get_num_threads()})
    forms = {(count, beside): lambda c=count, b=beside: scoring(c, b) for count in counts for beside in (False, True)}
    took = medians({str(key): run for key, run in forms.items()}, args.rounds)
    rates = {key: len(sequences) / took[str(key)] for key in forms}
    table(
        "torch's threads | sequences/s | beside a busy thread",
        [f"{count} | {rates[count, False]:.1f} | {rates[count, True]:.1f}" for count in counts],
    )


# ------------------------------------------------------------------------------------------------------ devices


def devices(args: argparse.Namespace) -> None:
    request = ScoreRequest(tokens=[s.tokens for group in read(args) for s in group])
    cores = torch.get_num_threads()
    asked = ("a", "b", "sum")
    places = {
        "cpu, half of the cores": (["cpu", "cpu"], max(1, cores // 2)),
        "cpu, all cores": (["cpu", "cpu"], cores),
        "cpu:0 and cpu:1": (["cpu:0", "cpu:1"], cores),  # which divide them
    }
    with asyncio.Runner() as runner:
        forms = {}
        for place, (names, num_threads) in places.items():
            torch.set_num_threads(num_threads)
            service = build_service(two_models(args.model, names))
            runner.run(start(service))
            for name in asked:
                forms[f"{place}: {name}"] = run = lambda s=service, n=name: runner.run(s.score(n, request))
                run()  # each thread that computes takes over torch's number of threads now
        took = medians(forms, args.rounds)
    rows = [" | ".join([place, *(f"{1e3 * took[f'{place}: {name}']:.1f}" for name in asked)]) for place in places]
    table(f"devices | a, ms | b, ms | their sum, ms, {len(request)} sequences", rows)
    half, *_, two = places
    alone = max(took[f"{half}: a"], took[f"{half}: b"])
    print(f"The sum on two devices takes {took[f'{two}: sum'] / alone:.2f} times the slower model alone.")


def two_models(model: Path, devices: list[str]) -> ServerConfig:
    models = [
        ModelConfig(model=str(model), name=name, device=device) for name, device in zip("ab", devices, strict=True)
    ]
    components = [ComponentConfig(model=model.name) for model in models]
    return ServerConfig(models=models, rewards=[RewardConfig(name="sum", components=components)])


async def start(service: Service) -> None:
    service.start()


TABLES = {"dtypes": dtypes, "memory": memory, "threads": threads, "devices": devices}

if __name__ == "__main__":
    main()
