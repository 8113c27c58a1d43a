"""Where metrics and samples go: a JSONL file and TensorBoard always, Weights & Biases and MLflow where asked for.

After a resume, what was logged behind the resumed step is dropped from the two that are always there, so that each step
stands in them once; the others keep what they were sent, and get the steps that are done again a second time.
"""

from __future__ import annotations

import html
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import METRICS
from guerdon.durable import ASIDE
from guerdon.errors import ConfigError, install_command

METRICS_FILE = "metrics.jsonl"
_SAMPLES = re.compile(r"step-(\d+)\.(?:txt|md)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place for metrics and samples."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Notes the metrics of a step; those of a name that is not there are unknown."""

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Notes these responses with their prompts and rewards."""

    def close(self) -> None:
        """Ends it, with everything on its way there."""


class Trackers:
    """All trackers of a run; a fault of those beside the files is told on the log, and the run goes on."""

    def __init__(
        self, output_dir: Path, names: Sequence[str], project: str, run_id: str, settings: dict[str, Any], step: int
    ) -> None:
        """Opens them to go on behind `step`; raises ConfigError where one cannot begin."""
        self._files: list[Tracker] = [MetricsFile(output_dir, step), TensorBoard(output_dir, step)]
        self._others: list[Tracker] = []
        if "wandb" in names:
            self._others.append(WeightsAndBiases(output_dir, project, run_id, settings))
        if "mlflow" in names:
            self._others.append(MLflow(project, run_id, settings))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """As Tracker.log."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """As Tracker.samples."""
        self._each(lambda tracker: tracker.samples(step, rollouts))

    def close(self) -> None:
        """As Tracker.close."""
        self._each(lambda tracker: tracker.close())

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for tracker in self._files:
            try:
                do(tracker)
            except OSError as e:  # what a disk did not take is tried again with what follows, as long as that is little
                log.error("%s: %s; the run goes on, make room on the disk", type(tracker).__name__, e)
        for tracker in self._others:
            try:
                do(tracker)
            # Libraries that speak to servers of others raise whatever they like, and days of training matter more.
            except Exception as e:
                log.warning("%s did not take it, the run goes on: %s", type(tracker).__name__, e)


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for the first tracker whose library is not installed."""
    if "wandb" in names:
        _wandb()
    if "mlflow" in names:
        _mlflow()


def sample_text(step: int, rollouts: Sequence[Rollout]) -> str:
    """Prompts, responses and rewards as plain text; what they say stands indented, and no escape of a terminal's."""
    blocks = [f"Samples after step {step}"]
    for number, rollout in enumerate(rollouts, 1):
        reward = f"no reward: {rollout.error}" if rollout.reward is None else f"reward {rollout.reward:.3f}"
        ended = "response:" if rollout.is_end else "response, cut at the longest:"
        blocks.append(f"{number}. {reward}\n\n  prompt:\n{_indented(rollout.prompt.text)}")
        blocks.append(f"  {ended}\n{_indented(rollout.text)}")
    return "\n\n".join(blocks) + "\n"


def _indented(text: str) -> str:
    plain = _CONTROLS.sub(lambda control: f"\\x{ord(control[0]):02x}", text)
    return "\n".join(f"    {line}".rstrip() for line in plain.split("\n"))


def sample_table(step: int, rollouts: Sequence[Rollout]) -> str:
    """Prompts, responses and rewards as a table in Markdown, with nothing in a text that could be read as markup."""
    lines = [f"# Samples after step {step}", "", "| reward | prompt | response |", "| ---: | --- | --- |"]
    for rollout in rollouts:
        reward = f"failed: {_cell(rollout.error or '')}" if rollout.reward is None else f"{rollout.reward:.3f}"
        cut = "" if rollout.is_end else " *(cut)*"
        lines.append(f"| {reward} | {_cell(rollout.prompt.text)} | {_cell(rollout.text)}{cut} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text for one cell: HTML and Markdown stand as they are, and lines are broken by tags."""
    escaped = re.sub(r"[\\`*_\[\]|~$#]", lambda mark: f"&#{ord(mark[0])};", html.escape(text, quote=False))
    return "<br>".join(escaped.splitlines())


# ------------------------------------------------------------------------------------------- always there


class MetricsFile:
    """`metrics.jsonl`, a line a step, and `samples/step-000010.txt`."""

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
        """Adds a line, which is in the file when this returns."""
        self._file.write(_line({"step": step, "time": round(time.time(), 3), **metrics}))
        self._file.flush()

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Writes a file of its own."""
        self._samples.mkdir(exist_ok=True)
        text = sample_text(step, rollouts)
        (self._samples / f"step-{step:06d}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Syncs and closes the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a crash has cut is left out."""
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
        """One scalar each, in its section."""
        for name, value in metrics.items():
            section = METRICS[name][0]
            self._writer.add_scalar(f"{section}/{name}", value, step)

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A table in Markdown, which it renders."""
        self._writer.add_text("samples", sample_table(step, rollouts), step)

    def close(self) -> None:
        """Writes what is on its way."""
        self._writer.close()


# ------------------------------------------------------------------------------------------- where asked for


class WeightsAndBiases:
    """A run of Weights & Biases, which a resume goes on with."""

    def __init__(self, output_dir: Path, project: str, run_id: str, settings: dict[str, Any]) -> None:
        wandb = _wandb()
        try:
            self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(output_dir), config=settings)
        except wandb.Error as e:
            raise ConfigError(
                f"Weights & Biases cannot begin: {e}", "run `wandb login`, or set WANDB_MODE=offline"
            ) from e
        # Its own count of steps never goes back, as ours does after a crash.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A piece of HTML, which shows the text as it is."""
        shown = html.escape(sample_text(step, rollouts))
        self._run.log({"step": step, "samples": _wandb().Html(f"<pre>{shown}</pre>")})

    def close(self) -> None:
        """Waits until everything is there."""
        self._run.finish()


class MLflow:
    """A run of MLflow, which a resume finds again by its tag; where it is kept MLFLOW_TRACKING_URI says."""

    def __init__(self, project: str, run_id: str, settings: dict[str, Any]) -> None:
        self._mlflow = _mlflow()
        try:
            self._mlflow.set_experiment(project)
            found = self._mlflow.search_runs(filter_string=f"tags.guerdon_run = '{run_id}'", output_format="list")
            if found:
                self._mlflow.start_run(run_id=found[0].info.run_id)
            else:
                self._mlflow.start_run(run_name=run_id, tags={"guerdon_run": run_id})
                self._mlflow.log_dict(settings, "settings.json")
        except self._mlflow.exceptions.MlflowException as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise ConfigError(f"MLflow cannot begin: {reason}", "set MLFLOW_TRACKING_URI to its server") from e

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One metric each; its servers refuse those that are not finite."""
        self._mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """A file."""
        self._mlflow.log_text(sample_text(step, rollouts), f"samples/step-{step:06d}.txt")

    def close(self) -> None:
        """Ends the run there."""
        self._mlflow.end_run()


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as e:
        raise ConfigError("run.trackers has wandb, which is not installed", install_command("wandb")) from e
    return wandb


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError as e:
        raise ConfigError("run.trackers has mlflow, which is not installed", install_command("mlflow")) from e
    return mlflow
