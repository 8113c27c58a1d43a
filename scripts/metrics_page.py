"""Writes docs/metrics.md from the tables in the code; `--check` says whether it is out of date."""

from __future__ import annotations

from collections.abc import Iterator

import generated
from generated import ROOT
from guerdon.actor.run_metrics import METRICS
from guerdon.server import metrics, triton

PAGE = ROOT / "docs/metrics.md"

HEAD = """\
# Metrics

<!-- Made by scripts/metrics_page.py from the tables in the code. Change those, and run it again. -->

[A server's](#a-servers-metrics) are at `GET /metrics` in Prometheus' text format; [a run's](#a-runs-metrics), of
`guerdon reinforce`, `guerdon ppo` and `guerdon distill`, are logged once a step.

## A server's metrics

[Prometheus and Grafana](deploy/prometheus.md) has a scrape job, alerts and a dashboard. With keys, a key of the role
`score` reads them.

Names follow Prometheus' conventions, and vLLM's where it has the same metric. `model` is a served name (else
`unknown`), a sum of rewards or a critic's operation; `critic` is a critic's name. `outcome` is `ok` or a class of
`src/guerdon/errors.py`. No key and no sample is in a label. Histograms have `NAME_bucket{..., le}`, `NAME_sum` and
`NAME_count`. A series appears with its first value.

Every scoring request is counted once, when its answer is ready; while it is read or tokenised it neither waits nor
runs. A sum of rewards counts its own requests and sequences; waiting and computing count for its components.
"""

SECTIONS = {
    "traffic": "Traffic",
    "latency": "Latency",
    "queue": "Queue",
    "batches": "Batches",
    "shared prompts": "Shared prompts",
    "errors": "Memory and checks",
    "sums of rewards": "Sums of rewards",
    "judges": "Judges",
    "judges in words": "Judges in words",
    "isolated functions": "Isolated functions",
    "critic": "Critic",
    "ranks": "Ranks",
    "models": "Models",
}

NOTES = {
    "shared prompts": "The saved share is 1 - computed / received tokens.",
    "sums of rewards": "Use these as `mean` and `std` of [a component](rewards.md) with `normalize: given`.",
    "judges": "See [judge.md](judge.md#the-reward).",
    "judges in words": "See [chat_judge.md](chat_judge.md).",
    "isolated functions": "The [reasons](verifiers.md#what-ends-a-sample).",
    "critic": "See [critic.md](critic.md). Requests for values count above, as a model's.",
}

PROCESS = """
### Process

From Prometheus' client, on Linux: CPU time (`process_cpu_seconds_total`), memory (`process_resident_memory_bytes`,
`process_virtual_memory_bytes`), open files (`process_open_fds`, `process_max_fds`) and the start
(`process_start_time_seconds`).
"""

TRITON = """
### Triton's names

For autoscalers and dashboards that expect Triton's
[metrics](https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/metrics.html), made
of those above. Times are sums in microseconds: divide by `nv_inference_request_success` for means. `version` is
always `1`. A sum of rewards counts as an ensemble: its components compute. A critic's operations wait as requests to
the model whose turns they take.
"""

RUN = """
## A run's metrics

The names in `metrics.jsonl`; TensorBoard has them under `section/name`, Weights & Biases and MLflow under the name.
Each line has the `step`, the `time` in seconds since 1970, and the step's metrics; a non-finite number is `null`.
Step 0 is the validation before the first step. Lengths and `ended` include failed responses, other means do not. With
`guerdon distill` a response's reward is minus its reverse KL to the teacher.

| in the output folder | content |
| --- | --- |
| `metrics.jsonl` | one line per step, each step once also after a resume |
| `tensorboard/` | the same, and the samples, for TensorBoard |
| `curves.png` | reward, KL, entropy, length, loss and more, drawn when the run ends |
| `samples/step-000010.txt` | prompts, responses and rewards of a validation |
| `checkpoints/step-000020/` | a checkpoint; its `policy/` is a model for transformers (or peft) |
| `settings.yaml` | all settings of the run |
| `skipped_prompts.jsonl` | prompts that were too long, if any |
"""

RUN_SECTIONS = {
    "reward": "Reward",
    "kl": "KL",
    "response": "Responses",
    "policy": "Policy",
    "critic": "Critic (PPO)",
    "validation": "Validation",
    "progress": "Progress",
    "time": "Time",
}

BUCKETS = {
    "seconds": metrics.SECONDS,
    "sequences": metrics.COUNTS,
    "differences": metrics.DIFFERENCES,
    "masses": metrics.MASSES,
}


def server_row(name: str, made: metrics.Definition) -> str:
    """One metric of a server as a line of a table."""
    kind = made.kind.__name__.lower()
    if made.buckets:
        kind += " of " + next(what for what, buckets in BUCKETS.items() if buckets == made.buckets)
    total = "_total" if kind == "counter" else ""
    return f"| `{name}{total}{{{', '.join(made.labels)}}}` | {kind} | {made.text} |"


def server() -> Iterator[str]:
    """A heading and a table for each section of a server's metrics, and the buckets."""
    everything = metrics.TABLE | metrics.COLLECTED
    assert {made.section for made in everything.values()} == set(SECTIONS), "a section has no heading, or no metrics"
    for section, heading in SECTIONS.items():
        yield f"\n### {heading}\n"
        if section in NOTES:
            yield NOTES[section] + "\n"
        yield from ("| name | kind | meaning |", "| --- | --- | --- |")
        yield from (server_row(name, made) for name, made in everything.items() if made.section == section)
    yield "\n### Buckets\n"
    yield from ("| histograms of | upper bounds |", "| --- | --- |")
    for what, bounds in BUCKETS.items():
        yield f"| {what} | {', '.join(f'{bound:g}' for bound in bounds)} |"


def triton_rows() -> Iterator[str]:
    """A table of Triton's names."""
    yield from ("| name | kind | meaning | source |", "| --- | --- | --- | --- |")
    for name, made in triton.TABLE.items():
        labels = "model, reason, version" if name.endswith("_failure") else "model, version"
        yield f"| `{name}{{{labels}}}` | {made.kind} | {made.text} | {made.source} |"


def run() -> Iterator[str]:
    """A heading and a table for each section of a run's metrics."""
    assert {section for section, _ in METRICS.values()} == set(RUN_SECTIONS), "a section has no heading, or no metrics"
    for section, heading in RUN_SECTIONS.items():
        yield f"\n### {heading}\n"
        yield from ("| name | meaning |", "| --- | --- |")
        yield from (f"| `{name}` | {text} |" for name, (of, text) in METRICS.items() if of == section)


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD.rstrip(), *server(), PROCESS.rstrip(), TRITON, *triton_rows(), RUN.rstrip(), *run()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    generated.main(__doc__, PAGE, page)
