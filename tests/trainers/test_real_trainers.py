"""The trainers themselves, each in its own environment, against a server: their requests, and what they read of it.

`make trainers` makes the environments; a trainer without one is left out, and the summary says so.
"""

import json
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import judged
import served
import zoo
from guerdon import CriticClient, RewardClient, TeacherClient
from guerdon.messages import answered
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import JudgeConfig, TeacherConfig
from ports import free_port
from processes import environment
from trainers import environments
from trainers.driving import SAMPLES, drive, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One reward model, computed sequence by sequence: a score is the same to the last digit whoever asks."""
    with served.plain(tmp_path_factory.mktemp("plain")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> np.ndarray:
    """The samples' rewards by KServe v2."""
    return rewards_of(server, "reward_model", SAMPLES)


def rewards_of(running: RunningServer, model: str, samples: list[dict[str, Any]]) -> np.ndarray:
    labels = [s["label"] for s in samples]
    with RewardClient(running.http_url, model) as client:
        scores = client.score(texts=served.texts(samples), prompts=[s["prompt"] for s in samples], labels=labels)
    return scores.raise_for_failed().rewards


def assert_same(got: list[Any], expected: np.ndarray) -> None:
    assert [np.float32(x) for x in got] == expected.tolist()


def test_openrlhf(server: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    told = drive("openrlhf", "drive_openrlhf.py", f"{server.http_url}/get_reward", "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)
    assert_same(told["scores"], expected)
    assert told["extra_logs"] == [{}] * len(SAMPLES)


@pytest.mark.parametrize("version", ["0.5.0", "0.5.9", "0.6.4", "0.8.2", "0.8.11", "0.9.0"])
def test_older_openrlhfs(server: RunningServer, expected: np.ndarray, tmp_path: Path, version: str) -> None:
    folder, url = str(environments.older_of("openrlhf", version)), f"{server.http_url}/get_reward"
    told = drive("openrlhf", "drive_openrlhf_older.py", folder, url, "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)


def test_openrlhf_by_a_python_file(server: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    script = tmp_path / "my_reward.py"
    script.write_text(
        f"from guerdon.adapters.openrlhf import reward_function\n\nreward_func = reward_function({server.http_url!r})\n"
    )
    told = drive("openrlhf", "drive_openrlhf.py", str(script), "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)


def test_openrlhf_logs_the_components_of_a_sum(sums: RunningServer, tmp_path: Path) -> None:
    told = drive("openrlhf", "drive_openrlhf.py", f"{sums.http_url}/get_reward?model=total", "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], rewards_of(sums, "total", SAMPLES))
    assert_same([logs["agreement"] for logs in told["extra_logs"]], rewards_of(sums, "agreement", SAMPLES))


def test_openrlhf_gets_no_number_for_a_sample_that_failed(sums: RunningServer, tmp_path: Path) -> None:
    asked = [SAMPLES[0], {**SAMPLES[1], "response": f" {served.FAILS}"}]
    url = f"{sums.http_url}/get_reward?model=flaky"
    told = drive("openrlhf", "drive_openrlhf.py", url, "SAMPLES", samples=asked, tmp=tmp_path)
    assert isinstance(told["rewards"][0], float) and told["rewards"][1] is None


def test_openrlhf_gets_no_number_if_nothing_answers(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/get_reward"
    told = drive("openrlhf", "drive_openrlhf.py", url, "SAMPLES", samples=SAMPLES[:2], tmp=tmp_path)
    assert told["rewards"] == [None, None]


def test_slime(server: RunningServer, sums: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    checkout = str(environments.source_of("slime"))
    told = drive("slime", "drive_slime.py", checkout, f"{server.http_url}/reward", "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)
    url = f"{sums.http_url}/reward?model=total&key=score"
    told = drive("slime", "drive_slime.py", checkout, url, "SAMPLES", "score", tmp=tmp_path)
    assert_same(told["rewards"], rewards_of(sums, "total", SAMPLES))


@pytest.mark.parametrize("manager", ["loop", "classic"])
def test_verl(server: RunningServer, expected: np.ndarray, tmp_path: Path, manager: str) -> None:
    told = drive_verl(manager, {"url": server.http_url}, "compute_score", tmp_path)
    assert_same(told["rewards"], expected)


def test_verl_with_an_async_function(sums: RunningServer, tmp_path: Path) -> None:
    told = drive_verl("loop", {"url": sums.http_url, "model": "total"}, "compute_score_async", tmp_path)
    assert_same(told["rewards"], rewards_of(sums, "total", SAMPLES))
    assert_same(told["extra"]["agreement"], rewards_of(sums, "agreement", SAMPLES))


def test_verls_reward_loop_with_the_manager_of_its_page_and_gsm8ks_data(sums: RunningServer, tmp_path: Path) -> None:
    page = (Path(served.__file__).parents[1] / "docs/trainers/verl.md").read_text()
    (command,) = re.findall(r"(?s)```\n(python -m verl[^`]*reward_manager[^`]*)```", page)
    flags = [flag for flag in shlex.split(command.replace("\\\n", "")) if "=" in flag]
    flags = [flag.replace("http://127.0.0.1:5555", sums.http_url) for flag in flags] + [
        "+reward.reward_kwargs.model=graded"
    ]
    folder = zoo.tokenizer(tmp_path / "policy")
    told = drive("verl", "drive_verl.py", "manager", json.dumps(flags), "SAMPLES", str(folder), tmp=tmp_path)
    with RewardClient(sums.http_url, "graded") as client:
        chats = [answered([{"role": "user", "content": s["prompt"]}], s["response"]) for s in SAMPLES]
        expected = client.score(messages=chats, labels=[s["label"] for s in SAMPLES]).raise_for_failed()
    assert_same(told["rewards"], expected.rewards)
    assert told["places"] == [[place] for place in told["last"]]
    assert set(told["extra"]) == {"helpful", "graded_answer", "score"}
    assert_same(told["extra"]["score"], expected.rewards)


def drive_verl(manager: str, kwargs: dict[str, Any], name: str, tmp: Path) -> Any:
    path = str(Path(served.__file__).parents[1] / "src/guerdon/adapters/verl.py")
    return drive("verl", "drive_verl.py", manager, path, "SAMPLES", json.dumps(kwargs), name, tmp=tmp)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_verls_reward_loop_asks_as_if_it_were_vllm_or_sglang(
    server: RunningServer, expected: np.ndarray, tmp_path: Path, engine: str
) -> None:
    told = drive("verl", "drive_verl.py", engine, server.http_url.removeprefix("http://"), "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)


def test_vllms_forms(server: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    told = drive("vllm", "drive_vllm.py", server.http_url, "reward_model", "SAMPLES", tmp=tmp_path)
    errors, activated = told.pop("errors"), told.pop("activated")
    assert told.pop("models") == ["reward_model"]
    for form, rewards in told.items():
        assert [np.float32(x) for x in rewards] == expected.tolist(), form
    assert activated == pytest.approx([1 / (1 + math.exp(-x)) for x in expected], abs=1e-6)
    assert errors["unknown model"][:2] == [404, 404]
    assert {name: told[0] for name, told in errors.items() if name != "unknown model"} == dict.fromkeys(
        ("no samples", "a number", "no input", "unknown task", "too long"), 400
    )


def test_sglangs_forms(server: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    told = drive("sglang", "drive_sglang.py", server.http_url, "reward_model", "SAMPLES", tmp=tmp_path)
    assert told.pop("errors") == {"both": 400, "neither": 400}
    for form, rewards in told.items():
        assert [np.float32(x) for x in rewards] == expected.tolist(), form


def test_areal(server: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    told = drive("areal", "drive_areal.py", server.http_url, "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)


def test_nemo_rl(server: RunningServer, sums: RunningServer, expected: np.ndarray, tmp_path: Path) -> None:
    checkout = str(environments.source_of("nemo_rl"))
    told = drive("nemo_rl", "drive_nemo_rl.py", checkout, server.http_url, "SAMPLES", tmp=tmp_path)
    assert_same(told["rewards"], expected)
    assert told["metrics"]["guerdon/mean_reward"] == pytest.approx(expected.mean())
    told = drive("nemo_rl", "drive_nemo_rl.py", checkout, sums.http_url, "SAMPLES", "total", tmp=tmp_path)
    assert_same(told["rewards"], rewards_of(sums, "total", SAMPLES))


@pytest.mark.parametrize("version", ["1.1.0", "1.10.0"])
def test_older_trls_ask_a_teacher(tmp_path: Path, version: str) -> None:
    zoo.language_model("llama", tmp_path / "teacher")
    (tmp_path / "rows.json").write_text(json.dumps([[row, 2] for row in ROWS]))
    with (
        served.running(TeacherConfig(model=str(tmp_path / "teacher"))) as running,
        TeacherClient(running.http_url) as client,
    ):
        folder, rows = str(environments.older_of("trl", version)), str(tmp_path / "rows.json")
        told = drive("trl", "drive_trl_older.py", folder, running.http_url, rows, tmp=tmp_path)
        expected = client.top(5, tokens=ROWS, prompt_lengths=[2] * len(ROWS))
    assert expected.logprobs and expected.top_ids and expected.top_logprobs
    for i, row in enumerate(ROWS):
        arrays, lists = ({name: values[i] for name, values in told[form].items()} for form in ("binary", "lists"))
        np.testing.assert_allclose(arrays["logprobs"], expected.top_logprobs[i], rtol=1e-6)
        assert np.array_equal(arrays["logprob_token_ids"], expected.top_ids[i])
        np.testing.assert_allclose(np.array(arrays["actual_logprobs"])[:, 0], expected.logprobs[i], rtol=1e-6)
        for j, (ids, values) in enumerate(zip(lists["logprob_token_ids"], lists["logprobs"], strict=True)):
            assert ids[:5] == arrays["logprob_token_ids"][j] and row[2 + j] in ids
            np.testing.assert_allclose(values[:5], expected.top_logprobs[i][j], rtol=1e-6)


ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]


def drive_nemo_aligner(actor: dict[str, Any], tmp: Path) -> Any:
    (tmp / "actor.yaml").write_text(yaml.safe_dump(actor))
    (tmp / "rows.json").write_text(json.dumps(ROWS))
    arguments = (str(environments.source_of("nemo_aligner")), str(tmp / "actor.yaml"), str(tmp / "rows.json"))
    return drive("nemo_aligner", "drive_nemo_aligner.py", *arguments, tmp=tmp)


def test_nemo_aligners_reinforce_actor(server: RunningServer, tmp_path: Path) -> None:
    at = {"name": "reward_model", "ip": "127.0.0.1", "port": int(server.http_url.rpartition(":")[2])}
    told = drive_nemo_aligner({"remote_rm": {"pad_to_length": 64, "reward_model": at}}, tmp_path)
    with RewardClient(server.http_url) as client:
        assert_same(told["rewards"], client.score(tokens=ROWS).rewards)


def test_nemo_aligners_ppo_actor(tmp_path: Path) -> None:
    with served.critic(tmp_path) as running:
        at = {"ip": "127.0.0.1", "port": int(running.http_url.rpartition(":")[2])}
        names = {"train": "critic_train", "infer": "critic_infer", "save": "critic_save"}
        section = {
            "pad_to_length": 64,
            "combine_rm_and_critic_server": True,
            "reward_model": {"name": "reward_model", **at},
            "critic": {"name": names, **at},
        }
        with CriticClient(running.http_url) as client:
            before = client.infer_with_rewards(tokens=ROWS)
            told = drive_nemo_aligner({"remote_critic_rm": section}, tmp_path)
            assert_same(told["rewards"], before.rewards)
            for row, values, got in zip(ROWS, before.values, told["values"], strict=True):
                assert_same(got[: len(row) - 1], values[:-1])
            assert told["loss"] == [pytest.approx(0.5, abs=1e-6)] and told["status"] == [0]
            state = client.state()
            assert state.step == 1 and len(state.checkpoints) == 1 and state.num_unsaved == 0


FAILING = [SAMPLES[0], {**SAMPLES[1], "response": f" {served.FAILS}"}]


def test_verl_ends_with_a_sample_that_failed(sums: RunningServer, tmp_path: Path) -> None:
    path = str(Path(served.__file__).parents[1] / "src/guerdon/adapters/verl.py")
    kwargs = json.dumps({"url": sums.http_url, "model": "flaky"})
    for manager, function in (("loop", "compute_score_async"), ("classic", "compute_score")):
        arguments = (manager, path, "SAMPLES", kwargs, function)
        done = run("verl", "drive_verl.py", *arguments, samples=FAILING, tmp=tmp_path)
        assert done.returncode != 0 and "SampleFailed: 1 of 1 samples failed" in done.stderr


def test_a_failed_sample_raises_for_areal_and_nemo_rl(sums: RunningServer, tmp_path: Path) -> None:
    done = run("areal", "drive_areal.py", sums.http_url, "SAMPLES", "flaky", samples=FAILING, tmp=tmp_path)
    assert done.returncode != 0 and "SampleFailed: 1 of 1 samples failed" in done.stderr
    arguments = (str(environments.source_of("nemo_rl")), sums.http_url, "SAMPLES", "flaky")
    done = run("nemo_rl", "drive_nemo_rl.py", *arguments, samples=FAILING, tmp=tmp_path)
    assert done.returncode != 0 and "SampleFailed: 1 of 2 samples failed; row 1" in done.stderr


def test_rewardbench(server: RunningServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    python = environments.python_of("rewardbench")
    if not python.exists():
        pytest.skip("no environment of rewardbench: `make trainers` makes it")
    folder = zoo.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": zoo.CHAT_TEMPLATE}  # for an older library
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | tokens))
    pairs = [
        {name: [{"role": "user", "content": SAMPLES[i]["prompt"]}, {"role": "assistant", "content": text}]
         for name, text in (("chosen", SAMPLES[i]["response"]), ("rejected", SAMPLES[i + 1]["response"]))}
        for i in range(0, 24, 2)
    ]  # fmt: skip
    (tmp_path / "pairs.json").write_text("\n".join(json.dumps(pair) for pair in pairs))
    command = [python, "-m", "guerdon.adapters.rewardbench", "--server", server.http_url, "--model", "mine",
               "--tokenizer", folder, "--dataset", "pairs.json", "--load_json", "--not_quantized", "--torch_dtype",
               "float32", "--batch_size", "5", "--output_dir", "out/"]  # fmt: skip
    offline = environment() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=offline, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = (tmp_path / "out").rglob("*_outputs.jsonl")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    with RewardClient(server.http_url) as client:
        for name in ("chosen", "rejected"):
            by_template = client.score(messages=[pair[name] for pair in pairs]).rewards
            assert_same([row[f"scores_{name}"] for row in rows], by_template)


def test_verl_with_a_judge(tmp_path: Path) -> None:
    """P(yes) as the reward: verl keeps each criterion beside it."""
    model = str(zoo.tokenizer(zoo.language_model("llama", tmp_path / "judge")))
    judge = JudgeConfig(model=model, name="judge", rubric=judged.write(tmp_path), max_other_mass=1.0)
    with served.running(judge, grpc_port=0) as running:
        told = drive_verl("loop", {"url": running.http_url, "model": "judge"}, "compute_score_async", tmp_path)
        with RewardClient(running.http_url, "judge") as client:
            wanted = client.score(texts=served.texts(SAMPLES), prompts=[s["prompt"] for s in SAMPLES])
    assert told["rewards"] == pytest.approx(wanted.raise_for_failed().rewards.tolist(), abs=1e-5)
    assert wanted.attributes is not None
    for name, values in zip(wanted.attribute_names, wanted.attributes.T, strict=True):
        assert told["extra"][name] == pytest.approx(values.tolist(), abs=1e-5)
