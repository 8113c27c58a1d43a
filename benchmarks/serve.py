"""guerdon beside other servers, alternating in one run, on one random model over RLHF-shaped text.

  python benchmarks/serve.py --data FILE.jsonl[.gz]        a table on the terminal, results and a plot under --out
  python benchmarks/serve.py --setup                       first make the peers' environments (gigabytes, once)

Peers without an environment are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
from tqdm import tqdm

import load
from forms import FORMS, HERE, NULL_FORMS, NULL_ROW, PADDED_TO_MAXIMUM, REQUIREMENTS, Form, command
from report import machine, plot, report
from workload import Group, make_groups, make_models, read_groups

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
}
"""Every server's: no hub, no reports home."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help='JSONL of {"prompt", "responses"}; default: the demo\'s prompts')
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of models, results and the plot")
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="folder of the peers' environments")
    parser.add_argument("--prompts", type=int, default=16, help="prompts, each with all its responses (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all forms; medians are shown (default: 3)")
    parser.add_argument("--null-seconds", type=float, default=4.0, help="time of one null measurement (default: 4)")
    parser.add_argument("--only", help="only forms whose name contains this text")
    parser.add_argument("--skip", choices=["null", "model"], help="leave one of the two measurements out")
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and end")
    args = parser.parse_args()
    if args.setup:
        set_up(args.environments)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.data or Path(str(files("guerdon.demo") / "heldout.jsonl"))
    texts = read_groups(data, args.prompts)
    groups = make_groups(make_models(args.out, texts), texts)
    here = lambda f: f.server == "guerdon" or (args.environments / f.server.partition("-")[0]).exists()  # noqa: E731
    forms = [f for f in FORMS if here(f) and (args.only or "") in f.name]
    results: dict = {"about": about(groups), "missing": [f.name for f in FORMS if not here(f)]}
    if args.skip != "model":
        results["model"] = measure_model(forms, groups, args)
    if args.skip != "null":
        results["null"] = measure_null([f for f in NULL_FORMS if f in forms], args)
    (args.out / "serve.json").write_text(json.dumps(results, indent=1))
    text = report(results)
    (args.out / "serve.md").write_text(text)
    print(text)
    plot(results, args.out / "serve.png")


def set_up(environments: Path) -> None:
    """One virtual environment a peer."""
    for name, requirements in REQUIREMENTS.items():
        subprocess.run([sys.executable, "-m", "venv", environments / name], check=True)
        python = environments / name / "bin" / "python"
        # torch first and exact, so that no later requirement brings a build with a GPU's libraries.
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)


def measure_model(forms: list[Form], groups: list[Group], args: argparse.Namespace) -> dict:
    """By form: the rounds' sequences/s, tokens/s, latencies, and the largest difference from the reference."""
    found: dict = defaultdict(lambda: defaultdict(list))
    for _ in tqdm(range(args.rounds), desc="rounds over the model", file=sys.stderr):
        for name in ("engine", "transformers"):
            found[f"in process: {name}"]["seq_s"].append(in_process(name, args))
        for form in forms:
            # So slow that fewer prompts must do.
            some = groups[: max(2, len(groups) // 4)] if form.name == PADDED_TO_MAXIMUM else groups
            requests, wanted = form.requests(some)
            probe = form.write([NULL_ROW[:32]], ["a few words"])
            with serving(form, args, null=False, probe=probe) as port:
                in_flight = 16 if form.by_prompt else 64
                result = load.run(port, requests, in_flight, count=len(requests))
            wrong = [(a.status, a.body[:200]) for a in result.answers if a.status != 200]
            if wrong:
                raise RuntimeError(f"{form.name}: {len(wrong)} requests failed, the first: {wrong[0]}")
            num_sequences = sum(len(g.rows) for g in some)
            differs = [np.abs(np.array(form.read(a)) - wanted[a.index]).max() for a in result.answers]
            row = found[form.name]
            row["seq_s"].append(num_sequences / result.seconds)
            row["tok_s"].append(sum(len(r) for g in some for r in g.rows) / result.seconds)
            row["p50_ms"].append(result.latency_ms(50))
            row["p99_ms"].append(result.latency_ms(99))
            row["max_diff"].append(float(max(differs)))
    return {name: dict(row) for name, row in found.items()}


def in_process(what: str, args: argparse.Namespace) -> float:
    """Sequences/s without a server: guerdon's engine, or transformers one sequence at a time; in its own process."""
    script = [sys.executable, str(HERE / "in_process.py"), what, str(args.out), str(args.prompts)]
    data = ["--data", str(args.data)] if args.data else []
    done = subprocess.run([*script, *data], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def measure_null(forms: list[Form], args: argparse.Namespace) -> dict:
    """By form and concurrency: the rounds' requests/s and latencies of one request of 512 tokens."""
    found: dict = defaultdict(lambda: defaultdict(list))
    for _ in tqdm(range(args.rounds), desc="rounds over no model", file=sys.stderr):
        for form in forms:
            request = form.write([NULL_ROW], [""])
            with serving(form, args, null=True, probe=request) as port:
                for concurrency in (1, 8, 64):
                    load.run(port, [request], concurrency, seconds=0.5)
                    result = load.run(port, [request], concurrency, seconds=args.null_seconds)
                    row = found[form.name]
                    row[f"rps_{concurrency}"].append(result.per_s)
                    row[f"p50_ms_{concurrency}"].append(result.latency_ms(50))
    return {name: dict(row) for name, row in found.items()}


@contextlib.contextmanager
def serving(form: Form, args: argparse.Namespace, *, null: bool, probe: bytes) -> Iterator[int]:
    """Starts the form's server, waits until it answers `probe`, and ends its whole process group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(HERE), str(HERE / "peers"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    if form.server == "pytriton":
        # The Triton inside looks for libpython where the loader does not.
        python = args.environments / "pytriton" / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
        libraries = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        environment["LD_LIBRARY_PATH"] = libraries
    with open(args.out / "server.log", "ab") as log:
        server = subprocess.Popen(
            command(form.server, args.environments.absolute(), args.out.absolute(), port, null=null),
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 180
        while load.run(port, [probe], 1, count=1).answers[0].status != 200:
            if time.monotonic() > end or server.poll() is not None:
                raise RuntimeError(f"{form.server} did not start; see {args.out / 'server.log'}")
            time.sleep(0.2)
        yield port
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(8)
        if form.server == "ray":
            subprocess.run([args.environments / "ray/bin/ray", "stop", "--force"], capture_output=True, check=False)


def about(groups: list[Group]) -> dict:
    """What was measured, and on what."""
    lengths = [len(row) for g in groups for row in g.rows]
    return {
        **machine(),
        "prompts": len(groups),
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "median_tokens": int(statistics.median(lengths)),
    }


if __name__ == "__main__":
    main()
