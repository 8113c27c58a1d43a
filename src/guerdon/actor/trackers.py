"""Where metrics and samples go: always a JSONL file and TensorBoard, optionally Weights & Biases and MLflow; a bar.

After a resume, the first two drop entries after the resumed step, so that each step occurs once. The others keep it,
and get repeated steps a second time.
"""

from __future__ import annotations

import html
import importlib
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from tqdm import tqdm

from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import METRICS
from guerdon.durable import ASIDE
from guerdon.errors import ConfigError, first_line, install_command

METRICS_FILE = "metrics.jsonl"
_SAMPLES = re.compile(r"step-(\d+)\.(?:txt|md)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_BAR_METRICS = {"reward": "reward", "kl": "KL", "entropy": "entropy", "response_length": "length"}

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A destination for metrics and samples."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of a step."""

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Logs these responses with their prompts and rewards."""

    def close(self) -> None:
        """Flushes and closes."""


class Trackers:
    """All trackers of a run; errors of one are logged, and the run continues."""

    def __init__(
        self, output_dir: Path, names: Sequence[str], project: str, run_id: str, settings: dict[str, Any], step: int
    ) -> None:
        """Opens them to continue after `step`; raises ConfigError if one cannot start."""
        self._files: list[Tracker] = [MetricsFile(output_dir, step), TensorBoard(output_dir, step)]
        self._others: list[Tracker] = []
        if "wandb" in names:
            self._others.append(WeightsAndBiases(output_dir, project, run_id, settings))
        if "mlflow" in names:
            self._others.append(MLflow(project, run_id, settings))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        self._each(lambda tracker: tracker.samples(step, rollouts))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for tracker in self._files:
            try:
                do(tracker)
            except OSError as e:  # a full disk: small data stays in the buffer for the next write
                log.error("%s: %s; the run continues; free disk space", type(tracker).__name__, e)
        for tracker in self._others:
            try:
                do(tracker)
            # Client libraries raise anything, and days of training matter more.
            except Exception as e:
                log.warning("%s failed, the run continues: %s", type(tracker).__name__, e)


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for the first tracker whose library is not installed."""
    for name in names:
        _library(name)


def sample_text(step: int, rollouts: Sequence[Rollout]) -> str:
    """Returns prompts, responses and rewards as indented plain text, with terminal escapes made visible."""
    blocks = [f"Samples after step {step}"]
    for number, rollout in enumerate(rollouts, 1):
        reward = f"no reward: {rollout.error}" if rollout.reward is None else f"reward {rollout.reward:.3f}"
        ended = "response:" if rollout.is_end else "response, truncated:"
        blocks.append(f"{number}. {reward}\n\n  prompt:\n{_indented(rollout.prompt.text)}")
        blocks.append(f"  {ended}\n{_indented(rollout.text)}")
    return "\n\n".join(blocks) + "\n"


def _indented(text: str) -> str:
    plain = _CONTROLS.sub(lambda control: f"\\x{ord(control[0]):02x}", text)
    return "\n".join(f"    {line}".rstrip() for line in plain.split("\n"))


def sample_table(step: int, rollouts: Sequence[Rollout]) -> str:
    """Returns prompts, responses and rewards as a Markdown table, with all markup in texts escaped."""
    lines = [f"# Samples after step {step}", "", "| reward | prompt | response |", "| ---: | --- | --- |"]
    for rollout in rollouts:
        reward = f"failed: {_cell(rollout.error or '')}" if rollout.reward is None else f"{rollout.reward:.3f}"
        cut = "" if rollout.is_end else " *(truncated)*"
        lines.append(f"| {reward} | {_cell(rollout.prompt.text)} | {_cell(rollout.text)}{cut} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escapes HTML and Markdown, and turns line breaks into tags."""
    escaped = re.sub(r"[\\`*_\[\]|~$#]", lambda mark: f"&#{ord(mark[0])};", html.escape(text, quote=False))
    return "<br>".join(escaped.splitlines())


# ------------------------------------------------------------------------------------------- always on


class MetricsFile:
    """`metrics.jsonl`, one line per step, and `samples/step-000010.txt`."""

    def __init__(self, output_dir: Path, step: int) -> None:
        self._path = output_dir / METRICS_FILE
        self._samples = output_dir / "samples"
        kept = [row for row in read_metrics(self._path) if row["step"] <= step] if step else []
        aside = output_dir / (ASIDE + METRICS_FILE)
        aside.write_bytes(b"".join(_line(row) for row in kept))
        aside.rename(self._path)
        self._file = self._path.open("ab")
        for path in self._samples.glob("step-*"):
            if (match := _SAMPLES.fullmatch(path.name)) and (not step or int(match[1]) > step):
                path.unlink()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Adds a line, and flushes."""
        self._file.write(_line({"step": step, "time": round(time.time(), 3), **metrics}))
        self._file.flush()

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Writes a file per step."""
        self._samples.mkdir(exist_ok=True)
        text = sample_text(step, rollouts)
        (self._samples / f"step-{step:06d}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Fsyncs and closes the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file, without a last line that a crash has truncated."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [orjson.loads(line) for line in lines[:-1]]


def _line(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)  # NaN and infinity become null


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, output_dir: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise ConfigError("TensorBoard is not installed", install_command("actor")) from e
        self._writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=step + 1 if step else 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one scalar per metric, in its section."""
        for name, value in metrics.items():
            section = METRICS[name][0]
            self._writer.add_scalar(f"{section}/{name}", value, step)

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Logs a Markdown table, which TensorBoard renders."""
        self._writer.add_text("samples", sample_table(step, rollouts), step)

    def close(self) -> None:
        self._writer.close()


# ------------------------------------------------------------------------------------------- optional


class WeightsAndBiases:
    """A run of Weights & Biases, which a resume continues."""

    def __init__(self, output_dir: Path, project: str, run_id: str, settings: dict[str, Any]) -> None:
        wandb = _library("wandb")
        try:
            self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(output_dir), config=settings)
        except wandb.Error as e:
            raise ConfigError(
                f"Weights & Biases cannot start: {e}", "run `wandb login`, or set WANDB_MODE=offline"
            ) from e
        # Its own step count never goes back, but ours does after a crash.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one row."""
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Logs HTML that shows the plain text."""
        shown = html.escape(sample_text(step, rollouts))
        self._run.log({"step": step, "samples": _library("wandb").Html(f"<pre>{shown}</pre>")})

    def close(self) -> None:
        """Waits until everything is uploaded."""
        self._run.finish()


class MLflow:
    """A run of MLflow, which a resume finds by its tag; MLFLOW_TRACKING_URI says where."""

    def __init__(self, project: str, run_id: str, settings: dict[str, Any]) -> None:
        self._mlflow = _library("mlflow")
        try:
            self._mlflow.set_experiment(project)
            found = self._mlflow.search_runs(filter_string=f"tags.guerdon_run = '{run_id}'", output_format="list")
            if found:
                self._mlflow.start_run(run_id=found[0].info.run_id)
            else:
                self._mlflow.start_run(run_name=run_id, tags={"guerdon_run": run_id})
                self._mlflow.log_dict(settings, "settings.json")
        except self._mlflow.exceptions.MlflowException as e:
            raise ConfigError(f"MLflow cannot start: {first_line(e)}", "set MLFLOW_TRACKING_URI to its server") from e

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs finite metrics; MLflow's servers refuse others."""
        self._mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Logs a file."""
        self._mlflow.log_text(sample_text(step, rollouts), f"samples/step-{step:06d}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


class ProgressBar:
    """A bar over the steps with reward, KL, entropy and length; disabled unless wanted."""

    def __init__(self, step: int, steps: int, is_wanted: bool) -> None:
        self._bar = tqdm(
            total=steps, initial=step, desc="step", unit="step", disable=not is_wanted, file=sys.stderr,
            dynamic_ncols=True,
        )  # fmt: skip

    def update(self, metrics: dict[str, float]) -> None:
        """Advances one step and shows its metrics."""
        shown = {label: f"{metrics[name]:.3g}" for name, label in _BAR_METRICS.items() if name in metrics}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ConfigError(f"run.trackers has {name}, which is not installed", install_command(name)) from e
