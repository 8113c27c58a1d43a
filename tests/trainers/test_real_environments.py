"""The libraries of environments, each in its own environment, against a server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import judged
import served
import zoo
from guerdon import RewardClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, JudgeConfig, ModelConfig, RewardConfig
from guerdon.settings.rubrics import ComparingConfig
from served import Serve
from stand_in_judge import KEY, MODEL, stand_in
from trainers.driving import drive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTIONS = ["What is 2+2?", "What is 2+3?", "What is 2+4?"]
SAYS = ["it is 4 of course", "5 and 5", "I do not know"]
LABELS = ["4", "5", "6"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    """A sum of a reward model and of a function that fails samples without a label."""
    models = [
        ModelConfig(
            model=str(served.reward_model(tmp_path_factory.mktemp("rm") / "rm")), name="helpful", deterministic=True
        ),
        ModelConfig(model="rewarding:words", name="words"),
    ]
    total = RewardConfig(name="total", components=[ComponentConfig("helpful"), ComponentConfig("words", weight=0.5)])
    return serve(*models, grpc_port=0, rewards=[total])


@pytest.fixture(scope="module")
def wanted(server: RunningServer) -> list[float]:
    messages = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": says}]
        for question, says in zip(QUESTIONS, SAYS, strict=True)
    ]
    with RewardClient(server.http_url, "total") as client:
        return client.score(messages=messages, labels=LABELS).raise_for_failed().rewards.tolist()  # type: ignore[no-any-return]


def test_nemo_gym_collects_rollouts(server: RunningServer, wanted: list[float], tmp_path: Path) -> None:
    """Its head server, its agent and its collection; the last row has no label, so that both its rollouts fail."""
    rows: list[dict[str, Any]] = [
        {"responses_create_params": {"input": [{"role": "user", "content": question}]}, "says": says}
        for question, says in zip([*QUESTIONS, "Nothing?"], [*SAYS, "nothing"], strict=True)
    ]
    for row, label in zip(rows, LABELS, strict=False):
        row["expected_answer"] = label
    host, port = server.http_url.removeprefix("http://").split(":")
    told = drive("nemo_gym", "drive_nemo_gym.py", host, port, "SAMPLES", str(tmp_path), samples=rows, tmp=tmp_path)
    good, failed = told["good"], told["failed"]
    assert len(told["results"]) == 8 and len(good) == 6 and len(failed) == 2
    for row in good:
        assert row["reward"] == pytest.approx(wanted[row["_ng_task_index"]], rel=1e-6)
        assert sum(row["reward_components"].values()) == pytest.approx(row["reward"], rel=1e-5)
        assert row["mask_sample"] is False and row["expected_answer"] == LABELS[row["_ng_task_index"]]
    for row in failed:
        assert row["mask_sample"] and row["instance_config"]["mask_sample"] and row["_ng_task_index"] == 3
        assert row["failure_kind"] == "InvalidRequest" and "label" in row["failure_reason"]
    # The failed rollouts, which this release of Gym sends as well, are not in the statistics.
    (metrics,) = told["metrics"]
    ours, gyms = metrics["agent_metrics"], told["gym"]["agent_metrics"]
    assert ours["num_rollouts"] == 8 and ours["num_failed_rollouts"] == 2
    names = [
        f"{kind}/{name}" for kind in ("mean", "max", "min", "median", "std") for name in ("reward", "total_tokens")
    ]
    assert {name: ours[name] for name in names} == pytest.approx({name: gyms[name] for name in names})
    assert metrics["key_metrics"]["mean/reward"] == pytest.approx(sum(wanted) / 3)
    groups = metrics["group_level_metrics"]
    assert [group["num_failed_rollouts"] for group in groups] == [0, 0, 0, 2]
    for group, gyms_group in zip(groups, told["gym"]["group_level_metrics"], strict=False):
        assert group["mean/reward"] == pytest.approx(gyms_group["mean/reward"])


def test_nemo_gyms_rollouts_wait_for_their_group(tmp_path: Path) -> None:
    """Its agent verifies each rollout by itself; a judge in words gets both of a task together."""
    (tmp_path / "key").write_text(KEY)
    with stand_in() as remote:
        judge = ChatJudgeConfig(
            name="careful", url=remote.url, model=MODEL, parse=ParseConfig(preset="brackets"),
            compare=ComparingConfig(scores="wins"), cache=str(tmp_path / "answers"), api_key_file=str(tmp_path / "key"),
        )  # fmt: skip
        rows = [
            {"responses_create_params": {"input": [{"role": "user", "content": question}]}, "says": says}
            for question, says in ((f"Task {i}?", [f"worth {1 + i}", f"worth {3 - i}"]) for i in range(3))
        ]
        with served.running(judge, group_size=2, group_wait_s=300.0) as running:
            host, port = running.http_url.removeprefix("http://").split(":")
            told = drive(
                "nemo_gym", "drive_nemo_gym.py", host, port, "SAMPLES", str(tmp_path), samples=rows, tmp=tmp_path
            )
    assert len(told["results"]) == len(told["good"]) == 6
    for row in told["good"]:
        text, task = row["response"]["output"][-1]["content"][0]["text"], row["_ng_task_index"]
        mine = int(text[-1])
        assert row["reward"] == 0.5 + 0.5 * np.sign(mine - (4 - mine)), (text, task)


def test_nemo_gyms_strategy_compares_groups(tmp_path: Path) -> None:
    """Its client of `/compare`, and its model of the reply; a response without a text is one of the group."""
    model = str(zoo.tokenizer(zoo.language_model("mixtral", tmp_path / "judge")))
    rubric = judged.write(tmp_path, judged.COMPARING)
    helpful = ModelConfig(model=str(served.reward_model(tmp_path / "rm")), name="helpful", deterministic=True)
    judge = JudgeConfig(model=model, name="judge", rubric=rubric, max_other_mass=1.0)

    def group(responses: list[str], **more: Any) -> dict[str, Any]:
        parts = [[{"type": "output_text", "text": text}] if text else [] for text in responses]
        said = [{"id": "r", "output": [{"type": "message", "role": "assistant", "content": part}]} for part in parts]
        return {"conversation_history": [{"role": "user", "content": QUESTIONS[0]}], "response_objs": said, **more}

    groups = [group([*SAYS, ""]), group(SAYS[:1]), group(SAYS, principle="Be brief.")]
    with served.running(helpful, judge, grpc_port=0) as running:
        messages = [
            [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": text}] for text in [*SAYS, ""]
        ]
        with RewardClient(running.http_url, "judge") as client:
            wanted = client.score(messages=messages).raise_for_failed()
        host, port = running.http_url.removeprefix("http://").split(":")
        told = drive("nemo_gym", "drive_nemo_gym_compare.py", host, port, "SAMPLES", samples=groups, tmp=tmp_path)
    assert told[0]["rewards"] == pytest.approx(wanted.rewards.tolist(), abs=1e-5) and told[0]["num_results"] == 12
    assert {"mean_individual_score", "std_individual_score", "tiebreak_usage_rate"} < {*told[0]["metrics"]}
    assert told[1]["status"] == 400 and "this sample is alone" in told[1]["error"]
    assert told[2]["status"] == 400 and "no place for a principle" in told[2]["error"]


def test_verifiers_evaluates_tasks(server: RunningServer, wanted: list[float], tmp_path: Path) -> None:
    """By its own command; the last task has no answer, so that its rollouts have an error and no score."""
    rows: list[dict[str, Any]] = [
        {"prompt": question, "says": says, "answer": label}
        for question, says, label in zip([*QUESTIONS, "Nothing?"], [*SAYS, "nothing"], [*LABELS, None], strict=True)
    ]
    arguments = (server.http_url, "SAMPLES", str(tmp_path))
    told = drive("verifiers", "drive_verifiers.py", *arguments, samples=rows, tmp=tmp_path)
    assert len(told) == 8
    for episode in told:
        (trace,), index = episode["traces"], episode["task"]["data"]["idx"]
        if index == 3:
            assert not episode["ok"] and not trace["ok"] and trace["rewards"] == {"helpful": None}
            (error,) = trace["errors"]
            assert error["type"] == "TaskError" and "SampleFailed" in error["message"] and "label" in error["message"]
            continue
        assert episode["ok"] and trace["errors"] == []
        assert trace["rewards"]["helpful"]["score"] == pytest.approx(wanted[index], rel=1e-6)
        assert trace["rewards"]["helpful"]["weight"] == 2
        assert trace["metrics"]["total/words"] == SAYS[index].split().count(LABELS[index])


def test_verifiers_tasks_bring_their_criteria(tmp_path: Path) -> None:
    """In the field of the answer, as JSON; a judge in words is asked each."""
    (tmp_path / "key").write_text(KEY)
    criteria = [
        [{"name": "words", "text": f"worth {i}", "weight": 2}, {"text": "worth 1", "weight": -1}] for i in range(2, 5)
    ]
    rows = [
        {"prompt": question, "says": says, "answer": json.dumps({"criteria": own})}
        for question, says, own in zip(QUESTIONS, SAYS, criteria, strict=True)
    ]
    with stand_in() as remote:
        judge = ChatJudgeConfig(
            name="total", url=remote.url, model=MODEL, template="{prompt} {response} {criterion}",
            sample_criteria="replace", reduce="mean", parse=ParseConfig(regex=r"Score: (\S+)"),
            cache=str(tmp_path / "answers"), api_key_file=str(tmp_path / "key"),
        )  # fmt: skip
        with served.running(judge) as running:
            arguments = (running.http_url, "SAMPLES", str(tmp_path))
            told = drive("verifiers", "drive_verifiers.py", *arguments, samples=rows, tmp=tmp_path)
    assert len(told) == 6
    for episode in told:
        (trace,), index = episode["traces"], episode["task"]["data"]["idx"]
        assert episode["ok"] and trace["errors"] == []
        assert trace["rewards"]["helpful"]["score"] == pytest.approx((2 * (2 + index) - 1) / 3)
        assert trace["metrics"]["total/words"] == 2 + index


def test_openenvs_environments_ask_for_their_rewards(
    server: RunningServer, wanted: list[float], tmp_path: Path
) -> None:
    """Over its own server and client; a step without a label has an error and no reward."""
    rows = [
        {"prompt": question, "says": says, "answer": label}
        for question, says, label in zip([*QUESTIONS, "Nothing?"], [*SAYS, "nothing"], [*LABELS, None], strict=True)
    ]
    told = drive("openenv", "drive_openenv.py", server.http_url, "SAMPLES", samples=rows, tmp=tmp_path)
    for how in ("step", "step_async"):
        *scored, failed = told[how]
        assert [reward for reward, _ in scored] == pytest.approx(wanted, rel=1e-6)
        counts = [float(says.split().count(label)) for says, label in zip(SAYS, LABELS, strict=True)]
        assert [components["words"] for _, components in scored] == counts
        assert isinstance(failed, str) and "label" in failed
