"""Measures guerdon beside every other server that can be installed, in one run; `make bench` runs it.

  python benchmarks/bench.py --setup --data FILE.jsonl[.gz]   everything; about half an hour on two cores
  python benchmarks/bench.py --quick --data FILE.jsonl[.gz]   eight responses per prompt, the best forms; some minutes

One random model, real chat text: prompts bare, short (with an earlier turn, about 180 tokens) and long (a conversation
of about 1,000 tokens), with 1 to 32 responses each. All forms score one cell after another, alternating in rounds. Then
come the servers without a model, the forward's share of the machine's limit (rates.py) and the cost by responses per
prompt (growth.py). Results, tables and pictures are written under --out; a repeated part replaces its old results.
Peers without an environment are skipped and named; --setup installs the missing ones (gigabytes, once).
The exit status is 1 if a promise does not hold. Promises are of plain transformers and of servers that pad or score
one by one; of vLLM, OpenVINO and ONNX Runtime there are goals, which the results show as reached or not reached.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import bench_plots
import claims
import contest
import load
from bench_report import report
from forms import FORMS, HERE, NULL_FORMS, NULL_ROW, Form
from in_process import ENGINE, IN_PROCESS, ONE_BY_ONE, REFERENCES, SORTED
from report import machine
from servers import Server, is_here, set_up
from workload import DEMO_PROMPTS, MOST_RESPONSE, PROMPTS, SHAPES, SHARES, make_cell, make_models, read_chats

RESPONSES = (1, 4, 8, 16, 32)
PARTS = ("peers", "null", "rates", "growth")
QUICK = [
    "guerdon, one request per prompt", "guerdon, one request per sequence",
    "PyTriton, one request per prompt, padded to its longest", "PyTriton, one request per sequence",
    "LitServe, one request per sequence, one at a time", "infinity, one request per prompt",
    "vLLM, one request per prompt", "vLLM, one request per sequence",
    ENGINE.name, SORTED.name, ONE_BY_ONE.name, "in process: OpenVINO, one by one", "in process: OpenVINO, queued",
]  # fmt: skip
"""The forms that may be the best of their kind."""


def main() -> int:
    args = arguments()
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, lambda number, _: sys.exit(128 + number))  # ends the servers, too
    args.out.mkdir(parents=True, exist_ok=True)
    if args.setup:
        set_up(args.environments)
    args.end = time.monotonic() + 60 * args.minutes
    path = args.out / "bench.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for part in args.parts:
        results[part] = {**machine(), **MEASURES[part](args)}
        path.write_text(json.dumps(results, indent=1))
    told = claims.claims_of(results)
    text = report(results) + "\n\n" + claims.verdict(told) + "\n"
    (args.out / "bench.md").write_text(text)
    bench_plots.draw(results, args.out)
    print(text)
    return 0 if claims.are_kept(told) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEMO_PROMPTS,
                        help='JSONL of {"prompt", "responses"}; default: the demo\'s prompts')  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of models, results and pictures")
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="folder of the peers' environments")
    parser.add_argument("--setup", action="store_true", help="first install the missing environments of the peers")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="shape of the model (default: small, 384 x 6)")
    parser.add_argument("--quick", action="store_true", help="only 8 responses, short and long, the best forms")
    parser.add_argument("--parts", type=listed(PARTS), default=None, help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--loads", type=listed(PROMPTS), default=None,
                        help=f"of {','.join(PROMPTS)} (default: all)")  # fmt: skip
    parser.add_argument("--responses", type=listed(map(str, RESPONSES)), default=None, help="(default: 1,4,8,16,32)")
    parser.add_argument("--response-tokens", type=int, default=MOST_RESPONSE,
                        help=f"responses are cut after so many (default: {MOST_RESPONSE})")  # fmt: skip
    parser.add_argument("--only", default="", help="measure only the peers whose forms' names contain this text")
    parser.add_argument("--busy", action="store_true", help="measure the peers beside a process that never waits")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all forms; medians are shown (default: 5)")
    parser.add_argument("--minutes", type=float, default=float("inf"),
                        help="start no round over the peers that would end later")  # fmt: skip
    parser.add_argument(
        "--null-seconds", type=float, default=2.0, help="seconds of one measurement without a model (default: 2)"
    )
    args = parser.parse_args()
    args.parts = args.parts or (["peers"] if args.quick else list(PARTS))
    args.loads = args.loads or (["short", "long"] if args.quick else list(PROMPTS))
    args.responses = args.responses or (["8"] if args.quick else list(map(str, RESPONSES)))
    return args


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns an argparse type for some of the known words, separated by commas."""
    words = tuple(known)

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(words):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(words)}")
        return found

    return read


def measure_peers(args: argparse.Namespace) -> dict:
    """Measures every form in every cell."""
    chats = read_chats(args.data)
    sample = [f"Human: {c['prompt']}\n\nAssistant: {r}" for c in chats[:100] for r in c["responses"]]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_models(args.out, [sample], args.shape))
    cells = [
        make_cell(chats, tokenizer, name, int(responses), args.response_tokens, SHARES[args.shape])
        for name in args.loads
        for responses in args.responses
    ]
    known = QUICK if args.quick else [f.name for f in (*FORMS, *IN_PROCESS)]
    names = [name for name in known if wanted(name, args.only)]
    found = contest.measure(cells, names, args.environments, args.out, rounds=args.rounds, end=args.end, busy=args.busy)
    return {
        "data": args.data.name,
        "shape": args.shape,
        "busy": args.busy,
        "rounds": args.rounds,
        "response_tokens": args.response_tokens,
        **found,
    }


def wanted(name: str, only: str) -> bool:
    """Returns whether a form is measured if its name must contain `only`; guerdon and the references always are."""
    return only in name or name.startswith("guerdon") or name in [form.name for form in REFERENCES]


def measure_null(args: argparse.Namespace) -> dict:
    """Returns requests/s and latencies without a model, one sequence per request, by form and concurrency."""
    found: dict = defaultdict(lambda: defaultdict(list))
    forms = [f for f in NULL_FORMS if is_here(f.server, args.environments) and wanted(f.name, args.only)]
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for form in list(forms):
            server = Server(form.server, args.environments, args.out, null=True)
            stack.callback(server.stop)
            try:
                server.wait(form.write([NULL_ROW], [""]))
            except RuntimeError as e:
                print(f"{form.name} is left out: {e}", file=sys.stderr)
                forms.remove(form)
                continue
            server.pause()
            servers[form.name] = server
        for _ in tqdm(range(args.rounds), desc="rounds over no model", file=sys.stderr):
            for form in forms:
                servers[form.name].resume()
                for name, value in one_null(form, servers[form.name].port, args.null_seconds).items():
                    found[form.name][name].append(value)
                servers[form.name].pause()
    return {"forms": {name: dict(row) for name, row in found.items()}}


def one_null(form: Form, port: int, seconds: float) -> dict[str, float]:
    """Returns requests/s and median latency at 1, 8 and 64 requests in flight."""
    request = form.write([NULL_ROW], [""])
    told = {}
    for concurrency in (1, 8, 64):
        load.run(port, [request], concurrency, seconds=0.5)
        result = load.run(port, [request], concurrency, seconds=seconds)
        told[f"rps_{concurrency}"], told[f"p50_ms_{concurrency}"] = result.per_s, result.latency_ms(50)
    return told


def by_script(name: str, args: argparse.Namespace) -> dict:
    """Runs a script of this folder in a process of its own; returns its results."""
    subprocess.run([sys.executable, HERE / f"{name}.py", "--out", args.out], check=True, stdout=subprocess.DEVNULL)
    return json.loads((args.out / f"{name}.json").read_text())


MEASURES = {
    "peers": measure_peers,
    "null": measure_null,
    "rates": lambda args: by_script("rates", args),
    "growth": lambda args: by_script("growth", args),
}

if __name__ == "__main__":
    sys.exit(main())
