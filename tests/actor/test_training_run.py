"""A run and what it leaves: stops, resumes, validation, files; with a policy and prompts, and rewards made here."""

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import zoo
from actor.rollouts import serving
from actor.runs import metrics_of, parts, tiny_policy, weights_of
from guerdon import CriticClient
from guerdon.actor import preemption
from guerdon.actor import training_run as actor_run
from guerdon.actor.rollouts import Rollout
from guerdon.actor.run_metrics import METRICS
from guerdon.actor.training_run import Run, RunSummary
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig
from guerdon.settings.config import CriticConfig
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, PolicyLossStats, reinforce_loss
from tiers import slow_but

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    zoo.checkpoint("llama", folder / "critic", seed=1)
    return folder


def config_of(folder: Path, out: Path, *, run: dict[str, Any] | None = None, **more: Any) -> ReinforceRunConfig:
    config = ReinforceRunConfig(**parts(folder, out, **{"steps": STEPS, **more}))
    config.run = replace(config.run, **{"save_every": 2, "validate_every": 2, "num_samples": 2, **(run or {})})
    return config


def score(rollouts: list[Rollout], heed: Callable[[], None] = lambda: None) -> None:
    """The share of even ids; one prompt's responses fail."""
    for rollout in rollouts:
        if rollout.prompt.id == 39:
            rollout.error = "no score"
        else:
            rollout.reward = float((rollout.tokens % 2 == 0).mean())


def learn(run: Run, rollouts: list[Rollout]) -> None:
    """One optimiser step on the rollouts' rewards; the global random numbers and the memory have a part in it."""
    width = max(rollout.response_length for rollout in rollouts)
    mask = torch.tensor([[float(t < rollout.response_length) for t in range(width)] for rollout in rollouts])
    run.memory["seen"] = run.memory.get("seen", 0) + len(rollouts)
    rewards = torch.tensor([[rollout.reward or 0.0] for rollout in rollouts]) + torch.rand(1) / run.memory["seen"]
    aggregation = Aggregation("token-mean", GlobalCounts.of(mask))

    def loss(logprobs: torch.Tensor, _: Any, members: np.ndarray) -> tuple[torch.Tensor, PolicyLossStats]:
        rows = torch.from_numpy(members)
        return reinforce_loss(logprobs, (rewards * mask)[rows], mask[rows], aggregation)

    lengths = np.array([rollout.prompt_length for rollout in rollouts])
    run.policy.step([rollout.tokens for rollout in rollouts], lengths, loss)


def train(config: Any, *, amid: Callable[[int], None] = lambda step: None, **more: Any) -> RunSummary:
    """A loop as those of REINFORCE and PPO; `amid` is called when a step's first group is there."""
    torch.manual_seed(7)  # for `learn`; a resume goes on with the numbers that it left
    with Run(config, score=score, **more) as run:
        for step in run.steps():
            rollouts: list[Rollout] = []
            for group in run.rollouts(step):
                rollouts += group
                if len(rollouts) == len(group):
                    amid(step)
            score(rollouts)
            learn(run, rollouts)
            run.finish(step, {"loss": 0.5, "kl": 0.25, "entropy": 2.0}, rollouts)
    return run.summary()


def timeless(out: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if "second" not in name and name != "time"}
        for row in metrics_of(out)
    ]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    summary = train(config_of(folder, out))
    assert (summary.step, summary.steps, summary.stopped, summary.exit_status) == (STEPS, STEPS, None, 0)
    return out


@pytest.fixture(scope="module")
def one_step(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of one step."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert train(config_of(folder, out, steps=1)).step == 1
    return out


def assert_same(out: Path, whole: Path) -> None:
    """Bitwise the same checkpoint at the end, and the same metrics, each step's once."""
    ends = [folder / f"checkpoints/step-{STEPS:06d}/policy" for folder in (out, whole)]
    files = [{path.name: path.read_bytes() for path in end.glob("*.safetensors")} for end in ends]
    assert files[0] == files[1] and len(files[0]) >= 3
    assert timeless(out) == timeless(whole)


# ------------------------------------------------------------------------------------------- what it leaves


def test_what_a_run_leaves(whole: Path, folder: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {".lock", "checkpoints", "curves.png", "metrics.jsonl", "samples", "settings.yaml", "tensorboard"}
    rows = metrics_of(whole)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(set(row) - {"step", "time"} <= set(METRICS) for row in rows)
    assert [row["step"] for row in rows if "validation_reward" in row] == [2, 4, 5]
    assert rows[0]["loss"] == 0.5 and rows[0]["epoch"] == 4 / 36 and rows[-1]["optimizer_steps"] == STEPS
    assert rows[0]["seconds_step"] > rows[0]["seconds_generation"] > 0
    first = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["validation_failed"] == 1 and "reward" not in first
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["step-000004", "step-000005"]
    assert yaml.safe_load((whole / "settings.yaml").read_text())["policy"]["model"] == str(folder / "policy")
    assert (whole / "curves.png").stat().st_size > 10_000


def test_samples_of_a_validation(whole: Path) -> None:
    assert [path.stem for path in sorted((whole / "samples").iterdir())] == [f"step-{i:06d}" for i in (0, 2, 4, 5)]
    text = (whole / "samples" / "step-000002.txt").read_text()
    assert text.startswith("Samples after step 2\n\n1. reward 0.") and "\n2. reward" in text and "\n3. " not in text


def test_transformers_loads_the_policy_of_a_checkpoint(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / f"checkpoints/step-{STEPS:06d}/policy")
    stored = weights_of(whole, STEPS)
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items() if name in stored)


def test_a_summary_says_where_things_are_and_how_to_resume(tmp_path: Path) -> None:
    done = RunSummary(tmp_path, 7, 7, None, {}, 0, tmp_path / "checkpoints/step-000007")
    assert (
        str(done)
        == f"7 steps are done: the policy is in {tmp_path}/checkpoints/step-000007/policy, the rest in {tmp_path}"
    )
    left = RunSummary(tmp_path, 3, 7, "SIGTERM", {}, 143, tmp_path / "step-000003")
    assert str(left) == f"SIGTERM: stopped after step 3 of 7; the same command resumes from {tmp_path}/step-000003"
    assert str(replace(left, checkpoint=None)).endswith("the same command starts over")


# ------------------------------------------------------------------------------------------- stopping and going on


@pytest.mark.parametrize(
    ("number", "status"), slow_but((signal.SIGTERM,), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
)
def test_a_signal_during_a_step_saves_and_stops_and_the_run_resumes(
    number: signal.Signals, status: int, folder: Path, whole: Path, tmp_path: Path
) -> None:
    config = config_of(folder, tmp_path)
    summary = train(config, amid=lambda step: os.kill(os.getpid(), number) if step == 4 else None)
    assert (summary.step, summary.stopped, summary.exit_status) == (3, number.name, status)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert (tmp_path / "curves.png").exists()
    torch.rand(7)
    if number == signal.SIGTERM:  # a checkpoint does not know which signal it was
        assert train(config).step == STEPS
        assert_same(tmp_path, whole)


@pytest.mark.slow
def test_a_signal_before_the_first_step_is_done(folder: Path, whole: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path)
    summary = train(config, amid=lambda step: os.kill(os.getpid(), signal.SIGTERM))
    assert (summary.step, summary.stopped) == (0, "SIGTERM")
    assert train(config).step == STEPS
    assert_same(tmp_path, whole)


class Clock:
    """The clock, which can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "done"),
    [
        ((10, 3590, 10, 10), 1),  # amid the second step no time is left but for saving
        *slow_but((), [((1000, 1000, 1000, 1000), 3)]),  # a fourth step of that length would end too late
        *slow_but((), [((10, 10, 10, 10), STEPS)]),
    ],
)
def test_the_time_limit_saves_and_stops_and_the_run_resumes(
    seconds: tuple[int, ...], done: int, folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (actor_run, preemption):
        monkeypatch.setattr(module, "time", clock)

    def passes(step: int) -> None:
        clock.ahead += dict(enumerate(seconds, 1)).get(step, 0)

    summary = train(config_of(folder, tmp_path, run={"time_limit": "60"}), amid=passes)
    left = ("time limit", 75) if done < STEPS else (None, 0)
    assert (summary.step, summary.stopped, summary.exit_status) == (done, *left)
    if done < STEPS:
        assert train(config_of(folder, tmp_path)).step == STEPS
    assert_same(tmp_path, whole)


@pytest.mark.slow
def test_more_steps_go_on_from_the_end(folder: Path, whole: Path, tmp_path: Path) -> None:
    assert train(config_of(folder, tmp_path, steps=3)).step == 3
    assert train(config_of(folder, tmp_path, steps=3)).step == 3  # nothing is left to do
    assert train(config_of(folder, tmp_path)).step == STEPS
    ends = [weights_of(out, STEPS) for out in (tmp_path, whole)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.slow
def test_lora_and_an_offloaded_optimiser_go_on_bitwise(folder: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "whole", tmp_path / "resumed"]
    for out, steps in zip(outs, ([3], [2, 3]), strict=True):
        for last in steps:
            train(config_of(folder, out, steps=last, lora=4, offload_optimizer=True))
    files = [
        {path.name: path.read_bytes() for path in (out / "checkpoints/step-000003/policy").glob("*.safetensors")}
        for out in outs
    ]
    assert files[0] == files[1] and "adapter_model.safetensors" in files[0]


@pytest.mark.slow
def test_the_seed_is_that_of_fresh_adapters_and_of_nobody_elses_numbers(folder: Path, tmp_path: Path) -> None:
    state, begun = torch.get_rng_state(), []
    for seed in (0, 1):
        config = config_of(folder, tmp_path / str(seed), run={"seed": seed}, lora=4)
        with Run(config, score=score) as run:
            begun.append(
                {n: p.detach().clone() for n, p in run.policy.trainer.model.named_parameters() if "lora_A" in n}
            )
    assert begun[0] and not any(torch.equal(begun[0][name], begun[1][name]) for name in begun[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_damaged_checkpoint_sets_the_run_back_one(
    folder: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(config_of(folder, tmp_path, steps=4))
    file = tmp_path / "checkpoints/step-000004/policy/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with caplog.at_level(logging.ERROR):
        assert train(config_of(folder, tmp_path)).step == STEPS
    assert "step-000004 IS DAMAGED" in caplog.text
    assert_same(tmp_path, whole)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"learning_rate": 1e-3}, "made with policy.learning_rate 0.003; now it is 0.001"),
        ({"rollouts": {"temperature": 0.5}}, "made with rollouts.temperature 1.0; now it is 0.5"),
        ({"run": {"seed": 1}}, "made with run.seed 0; now it is 1"),
    ],
)
def test_other_settings_do_not_go_on(change: dict[str, Any], says: str, folder: Path, one_step: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        train(config_of(folder, one_step, **change))


def test_other_prompts_or_another_model_do_not_go_on(folder: Path, one_step: Path, tmp_path: Path) -> None:
    config = config_of(folder, one_step)
    config.data.num_validation = 5
    with pytest.raises(CheckpointError, match=r"data\.prompts' digest"):
        train(config)
    other = tiny_policy(tmp_path / "other")
    zoo.language_model("llama", other / "policy", seed=5)
    with pytest.raises(CheckpointError, match=r"policy\.model's weights"):
        train(config_of(other, one_step))


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_ending_of_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(steps: int) -> ReinforceRunConfig:
        made = config_of(folder, tmp_path, steps=steps)
        made.data.template, made.remote_rm.send = True, "tokens"
        return made

    train(config(1))
    assert train(config(2)).step == 2
    monkeypatch.setattr("guerdon.actor.training_run.sent_ending", lambda *_: "<other>")
    with pytest.raises(
        CheckpointError, match=r"the ending of answers that the reward model gets '.*'; now .* '<other>'"
    ):
        train(config(3))


@pytest.mark.slow
def test_what_may_change_does_not_stop_it(folder: Path, one_step: Path, tmp_path: Path) -> None:
    shutil.copytree(one_step, tmp_path, dirs_exist_ok=True)
    run = {"save_every": 1, "validate_every": 1, "keep_checkpoints": 1, "time_limit": "10", "num_samples": 0}
    config = config_of(folder, tmp_path, steps=2, run=run, max_batch_tokens=64)
    config.remote_rm.reward_model.port = 1
    assert train(config).step == 2


def test_a_folder_is_one_runs_at_a_time(folder: Path, tmp_path: Path) -> None:
    with Run(config_of(folder, tmp_path), score=score), pytest.raises(ConfigError, match="another run is using"):
        Run(config_of(folder, tmp_path), score=score)
    with pytest.raises(ConfigError, match="cannot write to"):
        Run(config_of(folder, Path("/proc/nowhere")), score=score)


def test_a_run_that_shall_not_go_on_does_not_overwrite_another(folder: Path, tmp_path: Path) -> None:
    train(config_of(folder, tmp_path, steps=1, run={"resume": False}))
    with pytest.raises(ConfigError, match=r"has a run of 1 steps, and run\.resume is false"):
        train(config_of(folder, tmp_path, steps=1, run={"resume": False}))


@pytest.mark.slow
def test_an_error_goes_through_and_gives_the_folder_free(folder: Path, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            train(config_of(folder, tmp_path), amid=fail)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_no_room_for_a_prompt(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens is 256, and the policy takes 256 tokens in all"):
        Run(config_of(folder, tmp_path, rollouts={"max_new_tokens": 256}), score=score)


# ------------------------------------------------------------------------------------------- pairs with a critic


def paired(folder: Path, out: Path, steps: int = 2) -> PPORunConfig:
    config = PPORunConfig(**parts(folder, out, steps=steps))
    config.run.save_every = 1
    return config


def test_a_critic_whose_server_keeps_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    kept_nowhere = CriticConfig(model=str(folder / "critic"))
    with (
        serving(critic=kept_nowhere) as server,
        CriticClient(server.http_url) as critic,
        pytest.raises(ConfigError, match="keeps no checkpoints"),
    ):
        Run(paired(folder, tmp_path), score=score, critic=critic)


@pytest.mark.slow
def test_each_checkpoint_names_the_critics_and_a_lost_one_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    kept = CriticConfig(model=str(folder / "critic"), checkpoint_dir=str(tmp_path / "critic"))
    with serving(critic=kept) as server, CriticClient(server.http_url) as critic:
        rows = [np.arange(4, 10)]
        ones = [np.ones(5, np.float32)]
        train(
            paired(folder, out), critic=critic, amid=lambda step: critic.train(rows, ones, ones, ones).result() and None
        )
        names = [info.name for info in critic.state().checkpoints]
        assert [info.metrics["actor_step"] for info in critic.state().checkpoints] == [1, 2]
        for step, name in zip((1, 2), names, strict=True):
            state = json.loads((out / f"checkpoints/step-{step:06d}/state.json").read_text())
            assert state["manifest"]["state"]["critic"] == name

        for _ in range(2):
            critic.train(rows, ones, ones, ones).result()
            critic.save()  # as a run does that dies before its own checkpoint is there
            assert critic.state().step == 3
            with Run(paired(folder, out, steps=3), score=score, critic=critic):  # goes back to the pair
                assert critic.state().step == 2
    last = json.loads((out / "checkpoints/step-000002/state.json").read_text())["manifest"]["state"]["critic"]
    other = CriticConfig(model=str(folder / "critic"), checkpoint_dir=str(tmp_path / "another"))
    with serving(critic=other) as server, CriticClient(server.http_url) as critic:
        critic.train(rows, ones, ones, ones).result()
        with pytest.raises(CheckpointError, match=f"belongs to the critic's {last}, and its server has none"):
            Run(paired(folder, out, steps=3), score=score, critic=critic)
        with caplog.at_level(logging.WARNING):
            train(paired(folder, tmp_path / "new", steps=1), critic=critic)
    assert "the critic is at step 1 already" in caplog.text


def test_a_critic_that_drops_checkpoints_too_soon_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = CriticConfig(
        model=str(folder / "critic"), checkpoint_dir=str(tmp_path / "critic"), keep_checkpoints=1, save_every=1
    )
    rows, ones = [np.arange(4, 10)], [np.ones(5, np.float32)]
    with serving(critic=kept) as server, CriticClient(server.http_url) as critic, caplog.at_level(logging.WARNING):
        train(
            paired(folder, tmp_path / "run", steps=1), critic=critic,
            amid=lambda step: critic.train(rows, ones, ones, ones).result() and None,
        )  # fmt: skip
    assert "has removed checkpoint-000001" in caplog.text
