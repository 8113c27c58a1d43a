"""Measures one process, two ranks and two replicas: throughput, commands, train steps; and estimates 64 GPUs.

  python benchmarks/scale.py                     prints tables, writes results and a plot under --out
  python benchmarks/scale.py --only paper        repeats the estimate, with the parts that the last run measured

Every process has one thread, so two of them have twice the cores of one; the load generator shares the cores. All forms
alternate in rounds; medians are printed. The estimate is of a 70B model on 64 GPUs, as one server or as eight servers
of eight: from parts measured here, data sheets, and two guesses, which --mfu and --wire change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from critic import make_batch, random_groups
from guerdon import RetryPolicy, RewardClient
from guerdon.wire import kserve
from report import machine
from scale_paper import Setting
from scale_report import plot, report
from workload import DEMO_PROMPTS, make_models, make_tokenizer, read_groups

HERE = Path(__file__).parent
START_S = 300
TENSOR = ("--tensor-parallel", "2")
SERVED: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 process": (1, ()),
    "2 ranks, data parallel": (1, ("--data-parallel", "2")),
    "2 ranks, tensor parallel": (1, TENSOR),
    "2 replicas": (2, ()),
}
"""Number of servers, and the flags of each."""
TRAINED: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 process": (1, ()),
    "2 ranks, data parallel": (2, ()),
    "2 ranks, FSDP2": (2, ("--fsdp",)),
    "2 ranks, tensor parallel": (2, TENSOR),
}
COMMANDED = (2, 8)
"""Numbers of ranks that measure a command that computes nothing."""
PARTS = ("serve", "commands", "train", "paper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-scale"), help="folder of models and results")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of eight responses each (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all forms (default: 3)")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="measure only this; the others keep their last results"
    )
    parser.add_argument("--port", type=int, default=5600, help="the servers' first port (default: 5600)")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak, on paper (default: 0.4)")
    parser.add_argument("--wire", type=float, default=0.8, help="share of the links, on paper (default: 0.8)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "scale.json"
    results: dict = json.loads(kept.read_text()) if kept.exists() else {}
    results["about"] = machine()
    texts = read_groups(DEMO_PROMPTS, 64)
    folder = make_models(args.out, texts)
    groups = random_groups(args.prompts)
    measures = {
        "serve": lambda: measure_served(folder, groups, args),
        "commands": lambda: measure_commands(args),
        "train": lambda: measure_trained(folder, groups[: max(2, args.prompts // 2)], args),
        "paper": lambda: measure_host(texts),
    }
    for part in args.only or PARTS:
        results[part] = measures[part]()
        kept.write_text(json.dumps(results, indent=1))
    setting = Setting(mfu=args.mfu, wire=args.wire)
    text = report(results, setting)
    (args.out / "scale.md").write_text(text)
    print(text)
    plot(results, setting, args.out / "scale.png")


def measure_served(folder: Path, groups: list[list[np.ndarray]], args: argparse.Namespace) -> dict:
    """Returns the seconds of all groups by form and round, one request per group, all in flight."""
    seconds: dict[str, list[float]] = {name: [] for name in SERVED}
    for _ in tqdm(range(args.rounds), desc="rounds over the servers", file=sys.stderr):
        for name, (servers, flags) in SERVED.items():
            with contextlib.ExitStack() as stack:
                ports = range(args.port, args.port + servers)
                for port in ports:
                    stack.enter_context(serving(folder, port, flags, args.out / "server.log"))
                urls = [f"http://127.0.0.1:{port}" for port in ports]
                for url in urls:
                    with RewardClient(url, policy=RetryPolicy.patient(START_S, wait_for_start=True)) as client:
                        client.wait_ready(START_S)
                        client.score(tokens=groups[0])
                client = stack.enter_context(RewardClient(urls))
                started = time.perf_counter()
                futures = [client.submit(tokens=group) for group in groups]
                for future in futures:
                    future.result()
                seconds[name].append(time.perf_counter() - started)
    samples = sum(map(len, groups))
    return {"seconds": seconds, "samples": samples, "tokens": sum(len(row) for group in groups for row in group)}


@contextlib.contextmanager
def serving(folder: Path, port: int, flags: tuple[str, ...], log: Path) -> Iterator[None]:
    """Runs a server; ends its whole process tree."""
    words = ["serve", str(folder), "--port", str(port), "--no-grpc", "--device", "cpu", *flags]
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "guerdon", *words], env=environment(), stdout=output, stderr=output
        )
    try:
        yield
    finally:
        tree = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        for process in [*tree, server]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()


def measure_commands(args: argparse.Namespace) -> dict[str, list[dict]]:
    """Returns the median seconds of a command over the rounds, by number of ranks and size."""
    found = {}
    for ranks in COMMANDED:
        rounds = [in_ranks(ranks, "commands") for _ in tqdm(range(args.rounds), desc="commands", file=sys.stderr)]
        sizes = zip(*rounds, strict=True)
        found[str(ranks)] = [{key: statistics.median(row[key] for row in rows) for key in rows[0]} for rows in sizes]
    return found


def measure_trained(folder: Path, groups: list[list[np.ndarray]], args: argparse.Namespace) -> dict:
    """Returns the seconds of a train step on all groups, by form and round."""
    batch = make_batch(groups)
    np.savez(args.out / "batch.npz", **batch)
    seconds: dict[str, list[float]] = {name: [] for name in TRAINED}
    for _ in tqdm(range(args.rounds), desc="rounds over the trainers", file=sys.stderr):
        for name, (ranks, flags) in TRAINED.items():
            seconds[name] += in_ranks(ranks, "train", folder, args.out / "batch.npz", *flags)
    return {"seconds": seconds, "samples": len(batch["tokens"]), "tokens": int(batch["lengths"].sum())}


def measure_host(texts: list[list[str]]) -> dict:
    """Measures what one core does beside the ranks' work: tokenising, JSON, and splitting a batch."""
    from guerdon.distributed.shards import shards

    flat = [text for group in texts for text in group]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = make_tokenizer(flat)
    num_tokens = sum(map(len, tokenizer(flat)["input_ids"]))
    size = sum(len(text.encode()) for text in flat)
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [len(flat)], "data": flat}]
    body = json.dumps({"inputs": inputs}).encode()
    rows = [row for group in random_groups(128) for row in group]
    return {
        "tokenise_tokens_s": num_tokens / seconds_of(lambda: tokenizer(flat)),
        "decode_bytes_s": len(body) / seconds_of(lambda: kserve.decode(body, None)),
        "bytes_a_token": size / num_tokens,
        "shards_tokens_s": sum(map(len, rows)) / seconds_of(lambda: shards(rows, 8)),
    }


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the CPU time of a single-threaded call: the median of five runs, after a warm-up."""
    work()
    times = []
    for _ in range(5):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times)


def in_ranks(ranks: int, *words: object) -> list:
    """Returns what scale_ranks.py prints."""
    command = [*launcher(ranks), str(HERE / "scale_ranks.py"), *map(str, words)]
    done = subprocess.run(command, env=environment(), check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def launcher(ranks: int) -> list[str]:
    """Returns the command that runs a script in one process, or by torchrun in several."""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *(many if ranks > 1 else [])]


def environment() -> dict[str, str]:
    """Returns an environment with one thread per process."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main()
