"""What a run leaves to look at: metrics, TensorBoard, samples, curves; and that the page about them is whole."""

import importlib.util
import json
import logging
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from guerdon.actor import run_metrics, trackers
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.actor.run_metrics import METRICS, rollout_metrics
from guerdon.actor.trackers import Trackers, read_metrics, sample_table
from guerdon.errors import ConfigError
from tiers import slow_but

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rollout(reward: float | None, length: int = 3, text: str = "fine", *, is_end: bool = True) -> Rollout:
    prompt = Prompt(0, np.arange(4), "say | `this`\nand <b>that</b>")
    error = "no score" if reward is None else None
    return Rollout(prompt, 0, 0, np.arange(4 + length), is_end, np.zeros(length, np.float32), text, reward, error)


def opened(folder: Path, step: int = 0, names: tuple[str, ...] = ()) -> Trackers:
    return Trackers(folder, names, "project", "run", {"a": 1}, step)


# ------------------------------------------------------------------------------------------- names


def test_the_page_defines_every_name_that_is_logged_and_no_other() -> None:
    told = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(told) == {name: text for name, (_, text) in METRICS.items()}
    assert len(told) == len(METRICS)


def test_metrics_of_rollouts() -> None:
    metrics = rollout_metrics([rollout(1.0, 2), rollout(None, 3, is_end=False), rollout(4.0, 7)])
    assert metrics == {
        "reward": 2.5, "reward_std": 1.5, "reward_min": 1.0, "reward_max": 4.0, "failed": 1.0, "ended": 2 / 3,
        "response_length": 4.0, "response_length_min": 2.0, "response_length_max": 7.0, "prompt_length": 4.0,
    }  # fmt: skip
    assert set(metrics) <= set(METRICS)
    assert rollout_metrics([rollout(None)], "validation_") == {
        "validation_failed": 1.0, "validation_response_length": 3.0, "validation_ended": 1.0
    }  # fmt: skip
    assert rollout_metrics([]) == {}


# ------------------------------------------------------------------------------------------- files


def test_a_line_a_step_and_after_a_resume_each_step_once(tmp_path: Path) -> None:
    tracked = opened(tmp_path)
    for step in range(5):
        tracked.log(step, {"reward": float(step), "loss": math.nan if step == 2 else 0.5})
        tracked.samples(step, [rollout(float(step))])
    # A crash: nothing is closed, and the last line is cut.
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "rew')
    tracked = opened(tmp_path, step=2)
    tracked.log(3, {"reward": -3.0})
    tracked.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, -3.0)]
    assert rows[2]["loss"] is None and rows[1]["time"] <= rows[3]["time"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [f"step-00000{i}.txt" for i in range(3)]


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    tracked = opened(tmp_path)
    tracked.log(0, {"reward": 1.0})
    tracked.samples(0, [rollout(1.0)])
    tracked.close()
    opened(tmp_path).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert list((tmp_path / "samples").iterdir()) == []


def test_tensorboard_has_the_same_without_what_was_done_again(tmp_path: Path) -> None:
    tracked = opened(tmp_path)
    for step in range(5):
        tracked.log(step, {"reward": float(step)})
    tracked.close()
    begun = int(time.time())
    while int(time.time()) == begun:  # files are read in the order of their names, which have seconds
        time.sleep(0.01)
    tracked = opened(tmp_path, step=2)
    tracked.log(3, {"reward": -3.0, "kl": 0.5})
    tracked.samples(3, [rollout(1.0)])
    tracked.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward/reward")]
    assert rewards == [(0, 0.0), (1, 1.0), (2, 2.0), (3, -3.0)]
    assert [event.value for event in events.Scalars("kl/kl")] == [0.5]
    assert "fine" in events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()


def test_samples_on_disk_are_plain_text(tmp_path: Path) -> None:
    rows = [rollout(1.25, text="*bold* & | <b>\n2. reward 9.000\x1b[31m"), rollout(None, is_end=False)]
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-000009.md").touch()  # as earlier versions called them, behind the resumed step
    tracked = opened(tmp_path, 7)
    tracked.samples(7, rows)
    tracked.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.read_text() == (
        "Samples after step 7\n\n"
        "1. reward 1.250\n\n"
        "  prompt:\n    say | `this`\n    and <b>that</b>\n\n"
        "  response:\n    *bold* & | <b>\n    2. reward 9.000\\x1b[31m\n\n"
        "2. no reward: no score\n\n"
        "  prompt:\n    say | `this`\n    and <b>that</b>\n\n"
        "  response, truncated:\n    fine\n"
    )


@pytest.mark.parametrize("step", [0, 7])
def test_files_of_others_among_the_samples_are_left(step: int, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    foreign = {"step-000010.txt.bak", "step-000010.png", "step-notes.md", "step-000010"}
    for name in (*foreign, "step-000010.txt"):
        (tmp_path / "samples" / name).touch()
    opened(tmp_path, step).close()
    assert {path.name for path in (tmp_path / "samples").iterdir()} == foreign


def test_the_table_of_samples_shows_texts_as_they_are() -> None:
    rows = [rollout(1.25, text="*bold* [x](y)\n# not a title | nor a cell"), rollout(None, is_end=False)]
    lines = sample_table(7, rows).splitlines()
    assert lines[0] == "# Samples after step 7" and len(lines) == 6
    first, second = lines[4], lines[5]
    assert first.count("|") == second.count("|") == 4
    assert first.startswith("| 1.250 | say &#124; &#96;this&#96;<br>and &lt;b&gt;that&lt;/b&gt; | &#42;bold&#42;")
    assert not re.search(r"[*`\[#](?!\d)", first)
    assert second.startswith("| failed: no score |") and second.endswith("fine *(truncated)* |")


# ------------------------------------------------------------------------------------------- extras


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_extra_that_is_not_installed_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"run.trackers has {name}, which is not installed") as caught:
        trackers.check_installed([name])
    assert caught.value.help == f"pip install '.[{name}]' in a clone of guerdon"
    trackers.check_installed([])


def test_without_tensorboard_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="TensorBoard is not installed"):
        opened(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (0, 1):
        tracked = opened(tmp_path, step, names=("wandb",))
        tracked.log(step + 1, {"reward": 1.0})
        tracked.samples(step + 1, [rollout(1.0)])
        tracked.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-run.wandb"))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()  # what it has read of the environment it keeps
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="Weights & Biases cannot begin") as raised:
        opened(tmp_path, names=("wandb",))
    assert "wandb login" in raised.value.help
    wandb.teardown()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_tracker_that_breaks_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = opened(tmp_path, names=("wandb",))
    wandb.finish()  # and now the library refuses all that comes
    with caplog.at_level(logging.WARNING):
        tracked.log(1, {"reward": 1.0})
        tracked.samples(1, [rollout(1.0)])
        tracked.close()
    assert "WeightsAndBiases did not take it" in caplog.text
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with pytest.raises(ConfigError, match="MLflow cannot begin"):
        opened(tmp_path, names=("mlflow",))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    for step in (0, 1):
        tracked = opened(tmp_path, step, names=("mlflow",))
        tracked.log(step + 1, {"reward": float(step), "loss": math.nan})
        tracked.samples(step + 1, [rollout(1.0)])
        tracked.close()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.0), (2, 1.0)]


def test_an_error_of_mlflows_without_a_text_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MlflowException(Exception): ...

    def fails(_: str) -> None:
        raise MlflowException

    exceptions = SimpleNamespace(MlflowException=MlflowException)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(exceptions=exceptions, set_experiment=fails))
    with pytest.raises(ConfigError, match="MLflow cannot start: MlflowException"):
        opened(tmp_path, names=("mlflow",))


# ------------------------------------------------------------------------------------------- bar and picture


def test_the_bar_shows_reward_kl_entropy_and_length(capsys: pytest.CaptureFixture[str]) -> None:
    bar = trackers.ProgressBar(3, 10, is_wanted=True)
    bar.update({"reward": 1.23456, "kl": 0.5, "entropy": 2.0, "response_length": 17.25, "loss": 9.0})
    bar.close()
    shown = capsys.readouterr().err
    assert "4/10" in shown and "reward=1.23, KL=0.5, entropy=2, length=17.2" in shown and "loss" not in shown
    trackers.ProgressBar(0, 10, is_wanted=False).update({})
    assert capsys.readouterr().err == ""


def history(num_steps: int, **more: float) -> list[dict[str, Any]]:
    numbers = np.random.default_rng(0)
    rows = []
    for step in range(num_steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {
                "reward": 2 * (1 - math.exp(-step / 40)) + numbers.normal(0, 0.15), "reward_std": 0.6,
                "kl": step / 30 + numbers.normal(0, 0.1), "entropy": 2.5 - step / 100 + numbers.normal(0, 0.03),
                "response_length": 40 + step / 5 + numbers.normal(0, 2), "loss": numbers.normal(0, 0.02),
                "grad_norm": abs(numbers.normal(1, 0.2)), "tokens_per_second": 900 + numbers.normal(0, 30), **more,
            }  # fmt: skip
        if step % 10 == 0:
            row["validation_reward"] = 2 * (1 - math.exp(-step / 40)) + 0.1
        rows.append(row)
    return rows


@pytest.mark.parametrize("num_steps", slow_but((8,), [1, 8, 120]))
def test_curves_are_drawn(num_steps: int, tmp_path: Path) -> None:
    rows = history(num_steps, critic_loss=0.3)
    rows[-1]["loss"] = None
    run_metrics.save_curves(rows, tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    run_metrics.save_curves([{"step": 0}], tmp_path / "none.png", "nothing to draw")
    assert not (tmp_path / "none.png").exists()


def test_the_smoothed_curve_is_a_centred_mean() -> None:
    line = np.arange(100.0)
    assert np.allclose(run_metrics.smoothed(line)[5:-5], line[5:-5]) and run_metrics.smoothed(line)[0] == 2.5
    spike = np.zeros(100)
    spike[50] = 11.0
    smooth = run_metrics.smoothed(spike)
    assert np.allclose(smooth[45:56], 1.0) and smooth[44] == smooth[56] == 0.0


def test_metrics_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    tracked = opened(tmp_path)
    tracked.log(1, {"reward": math.inf})
    tracked.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] is None
