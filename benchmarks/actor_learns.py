"""Trains policies on several seeds: REINFORCE with several KL coefficients, and PPO with a critic.

  python benchmarks/actor_learns.py FOLDER run.yaml          writes curves, a table and a plot under --out

FOLDER has a folder per seed, `seed-0`, ..., with `policy`, `reward_model`, `prompts.jsonl` and `validation.jsonl`;
missing ones are made by the demo's recipe. run.yaml has the settings that all runs share, and sections `reinforce`
and `ppo`. Every run is a `guerdon reinforce` or `guerdon ppo` process with a server of its own; two run at once, each
on one thread. The reward before and after is that of the validation prompts. Existing results are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import yaml

from critic_server import serving, serving_rewards
from report import machine

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHOWN = ("validation_reward", "kl", "entropy", "response_length")
TITLES = {"validation_reward": "reward of held-out prompts", "kl": "KL to the start", "entropy": "entropy, nats",
          "response_length": "response length, tokens"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/actor-learns"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--betas", type=float, nargs="*", default=[0.0, 0.3, 10.0], help="KL coefficients")
    parser.add_argument("--ppo", type=float, nargs="*", default=[0.3], help="the same for PPO; none: skip it")
    parser.add_argument("--critic-learning-rate", type=float, default=1e-3)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--port", type=int, default=5600)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [("reinforce", beta) for beta in args.betas] + [("ppo", beta) for beta in args.ppo]
    jobs = [(kind, beta, seed) for seed in range(args.seeds) for kind, beta in names]
    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(functools.partial(make, args.folder), range(args.seeds)))
        curves = list(pool.map(lambda i: run(*jobs[i], args, args.port + i), range(len(jobs))))
    results: dict[str, list[list[dict]]] = {}
    for (kind, beta, _), curve in zip(jobs, curves, strict=True):
        results.setdefault(f"{kind}, beta {beta:g}", []).append(curve)
    (args.out / "actor_learns.json").write_text(json.dumps({"about": machine(), "runs": results}))
    print("\n".join(table(results)))
    plot(results, args.out / "actor_learns.png")


def make(folder: Path, seed: int) -> None:
    """Makes the demo's models and prompts for this seed."""
    made = folder.resolve() / f"seed-{seed}"
    if not (made / "validation.jsonl").exists():
        code = f"from pathlib import Path; from demo import parts; parts.make(Path({str(made)!r}), {seed})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLES)


def run(kind: str, beta: float, seed: int, args: argparse.Namespace, port: int) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl."""
    out, folder = args.out / f"{kind}-{beta:g}-{seed}", args.folder / f"seed-{seed}"
    if not (out / "curves.png").exists():
        out.mkdir(parents=True)
        model, log = folder / "reward_model", out / "server.log"
        shared = yaml.safe_load(args.config.read_text())
        settings = {name: shared[name] for name in ("policy", "data", "rollouts", "run")} | {kind: shared.get(kind, {})}
        settings["policy"]["model"] = str(folder / "policy")
        settings["data"] |= {"prompts": str(folder / "prompts.jsonl"), "validation": str(folder / "validation.jsonl")}
        settings["run"] |= {"seed": seed, "output_dir": str(out), "progress": False}
        settings[kind]["kl_coefficient"] = beta
        if kind == "reinforce":
            settings["remote_rm"] = {"reward_model": {"port": port}}
            server: contextlib.AbstractContextManager = serving_rewards(model, port, log)
        else:
            settings["remote_critic_rm"] = {"critic": {"port": port}}
            flags = ["--reward-model", str(model), "--checkpoint-dir", str(out / "critic"), "--global-batch-size", "64"]
            server = serving(model, port, log, *flags, "--learning-rate", str(args.critic_learning_rate))
        (out / "run.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "guerdon", kind, str(out / "run.yaml")]
        with server, (out / "log").open("w") as log_file:
            subprocess.run(command, stdout=log_file, stderr=log_file, check=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [f"{name} {ends(lines, name)[0]:.3f} -> {ends(lines, name)[1]:.3f}" for name in SHOWN]
    print(f"{out.name}: {', '.join(told)}", flush=True)
    return lines


def ends(lines: list[dict], name: str) -> tuple[float, float]:
    """Returns the first and the last value logged under the name."""
    values = [line[name] for line in lines if name in line]
    return values[0], values[-1]


def table(results: dict[str, list[list[dict]]]) -> Iterator[str]:
    """Returns means and standard deviations over the seeds, as Markdown."""
    yield "| | reward before | after | rise | smallest rise | KL | entropy after | length after |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, curves in results.items():
        before, after = np.array([ends(lines, "validation_reward") for lines in curves]).T
        others = [np.array([ends(lines, shown)[1] for lines in curves]) for shown in SHOWN[1:]]
        cells = [before, after, after - before]
        texts = [f"{cell.mean():.3f} ± {cell.std(ddof=1):.3f}" for cell in cells] + [f"{(after - before).min():.3f}"]
        texts += [f"{cell.mean():.2f} ± {cell.std(ddof=1):.2f}" for cell in others]
        yield f"| {name} | {' | '.join(texts)} |"


def plot(results: dict[str, list[list[dict]]], path: Path) -> None:
    """Draws each seed's curves of the main metrics, and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5))
    for axis, shown in zip(axes.flat, SHOWN, strict=True):
        for number, (name, curves) in enumerate(results.items()):
            series = []
            for lines in curves:
                points = [(line["step"], line[shown]) for line in lines if shown in line]
                series.append([value for _, value in points])
                axis.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.25, linewidth=0.8)
            steps = [step for step, _ in points]
            axis.plot(steps, np.mean(series, axis=0), color=f"C{number}", linewidth=2, label=name)
        axis.set_title(TITLES[shown], loc="left")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    figure.suptitle(f"{len(curves)} seeds each; thin lines are seeds, thick ones their means", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
