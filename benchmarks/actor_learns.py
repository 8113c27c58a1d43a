"""Policies that learn from servers, seed by seed: REINFORCE at several costs of the KL, and PPO against a critic.

  python benchmarks/actor_learns.py FOLDER run.yaml          curves, a table and a plot under --out

FOLDER has `policy`, `reward_model`, `prompts.jsonl` and `validation.jsonl`; run.yaml the settings that all runs share.
Every run is a `guerdon reinforce` or `guerdon ppo` process against `guerdon serve` and `guerdon serve-critic`; two run
at once, each on one thread. The reward before and after is that of validation's prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from critic_server import serving, serving_rewards
from report import machine

SHOWN = ("validation_reward", "kl", "entropy", "response_length")
TITLES = {"validation_reward": "reward of held-out prompts", "kl": "KL to the start", "entropy": "entropy, nats",
          "response_length": "response length, tokens"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/actor-learns"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--betas", type=float, nargs="*", default=[0.0, 0.02, 1.0], help="costs of the KL")
    parser.add_argument("--ppo", type=float, nargs="*", default=[0.02], help="the same for PPO; none: leave it out")
    parser.add_argument("--ppo-flags", default="", help="further flags of the ppo runs")
    parser.add_argument("--critic-learning-rate", type=float, default=1e-3)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--port", type=int, default=5600)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [("reinforce", beta) for beta in args.betas] + [("ppo", beta) for beta in args.ppo]
    jobs = [(kind, beta, seed) for seed in range(args.seeds) for kind, beta in names]
    with contextlib.ExitStack() as stack:
        if args.betas:
            log = args.out / "server.log"
            stack.enter_context(serving_rewards(args.folder / "reward_model", args.port, log))
        with ThreadPoolExecutor(args.parallel) as pool:
            curves = list(pool.map(lambda i: run(*jobs[i], args, args.port + 1 + i), range(len(jobs))))
    results: dict[str, list[list[dict]]] = {}
    for (kind, beta, _), curve in zip(jobs, curves, strict=True):
        results.setdefault(f"{kind}, beta {beta:g}", []).append(curve)
    (args.out / "actor_learns.json").write_text(json.dumps({"about": machine(), "runs": results}))
    print("\n".join(table(results)))
    plot(results, args.out / "actor_learns.png")


def run(kind: str, beta: float, seed: int, args: argparse.Namespace, port: int) -> list[dict]:
    """The lines of metrics.jsonl of one run, which is not made again where it is there."""
    out = args.out / f"{kind}-{beta:g}-{seed}"
    flags = ["--run.seed", str(seed), "--run.output-dir", str(out), "--no-run.progress"]
    flags += ["--policy.model", str(args.folder / "policy"), f"--{kind}.kl-coefficient", str(beta)]
    flags += ["--data.prompts", str(args.folder / "prompts.jsonl")]
    flags += ["--data.validation", str(args.folder / "validation.jsonl")]
    with contextlib.ExitStack() as stack:
        if kind == "reinforce":
            flags += ["--remote-rm.reward-model.port", str(args.port)]
        elif not (out / "curves.png").exists():
            model, log = args.folder / "reward_model", args.out / f"critic-{seed}.log"
            critic = ["--reward-model", str(model), "--checkpoint-dir", str(args.out / f"critic-{beta:g}-{seed}")]
            critic += ["--learning-rate", str(args.critic_learning_rate)]
            stack.enter_context(serving(model, port, log, *critic))
            flags += ["--remote-critic-rm.critic.port", str(port), *args.ppo_flags.split()]
        if not (out / "curves.png").exists():
            command = [sys.executable, "-m", "guerdon", kind, str(args.config), *flags]
            with (args.out / f"{out.name}.log").open("w") as log_file:
                subprocess.run(command, stdout=log_file, stderr=log_file, check=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    print(f"{out.name}: {' -> '.join(f'{ends(lines, name)[i]:.3f}' for name in SHOWN[:2] for i in (0, 1))}", flush=True)
    return lines


def ends(lines: list[dict], name: str) -> tuple[float, float]:
    """The first and the last value logged under the name."""
    values = [line[name] for line in lines if name in line]
    return values[0], values[-1]


def table(results: dict[str, list[list[dict]]]) -> Iterator[str]:
    """Markdown: mean and standard deviation over the seeds."""
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
    """Each seed's curve, and their mean, of what a run is watched by."""
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
