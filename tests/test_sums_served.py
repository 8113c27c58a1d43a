"""A checkpoint's reward and functions of texts, prompts and labels as one reward, by every client."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pandas as pd
import pytest
import tritonclient.grpc
import tritonclient.http

import rewarding
import zoo
from guerdon import cli
from guerdon.assembly import build_service
from guerdon.cli import console, helps
from guerdon.client import RetryPolicy, RewardClient
from guerdon.core import Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    SampleFailed,
    UnknownModel,
)
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.settings.fields import from_mapping
from served import Serve
from server.helpers import outcomes, until, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:tritonclient.* doesn't support")

PROMPTS = ["two and two: ", "two and two: ", "a colour: "]
TEXTS = ["two and two: 4", "two and two: five", "a colour: red"]
LABELS = ["4", "4", {"any": ["red", "blue"]}]
ANSWERS = [1.0, 0.0, 0.0]
BREVITIES = [-len(text) / 100 for text in TEXTS]

SUMS = """
models:
  - {model: FOLDER, name: helpful, deterministic: true}
  - {model: "rewarding:brevity", name: brevity}
  - {model: "rewarding:answer", name: answer}
  - {model: "rewarding:length", name: length}
  - {model: "rewarding:words", name: words}
  - {model: "rewarding:pairs", name: pairs}
rewards:
  - name: reward_model
    components:
      - {model: helpful, weight: 0.5, normalize: given, mean: 0.25, std: 2.0}
      - {model: answer, weight: 3}
      - {model: brevity, weight: 0.1, clip: 0.15}
  - {name: of_ids, components: [{model: helpful}, {model: length, weight: 0.01}]}
  - {name: of_responses, components: [{model: helpful}, {model: words, weight: 2}]}
  - {name: adaptive, components: [{model: brevity, normalize: running}]}
"""

SERVED = {
    "reward_model", "of_ids", "of_responses", "adaptive", "helpful", "brevity", "answer", "length", "words", "pairs",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("sums") / "helpful"))


def configured(folder: Path, **more: Any) -> ServerConfig:
    import yaml

    settings = yaml.safe_load(SUMS.replace("FOLDER", json.dumps(str(folder))))
    config = from_mapping(ServerConfig, {**settings, "port": 0, "grpc_port": 0, **more})
    assert isinstance(config, ServerConfig)
    return config


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    config = configured(folder)
    return serve(config=config, grace_s=0.1)


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: RunningServer) -> str:
    return server.http_url if request.param == "http" else server.grpc_url or ""


@pytest.fixture(scope="module")
def helpful(server: RunningServer) -> list[float]:
    """What the checkpoint alone gives the texts."""
    with RewardClient(server.http_url, model="helpful") as client:
        return list(client.score(texts=TEXTS))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    rewarding.told.clear()
    rewarding.hold.clear()
    yield
    rewarding.hold.set()


def summed(helpful: list[float], answers: list[float] = ANSWERS) -> np.ndarray:
    """The rewards by hand."""
    parts = zip(helpful, answers, np.clip(BREVITIES, -0.15, 0.15), strict=True)
    return np.float32([0.5 * (h - 0.25) / 2.0 + 3 * a + 0.1 * b for h, a, b in parts])


def test_the_client_gets_the_sum_and_all_its_components(url: str, helpful: list[float]) -> None:
    with RewardClient(url) as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS, labels=LABELS).raise_for_failed()
    np.testing.assert_array_equal(scores.rewards, summed(helpful))
    assert scores.attribute_names == ("helpful", "answer", "brevity")
    np.testing.assert_array_equal(scores.attributes, np.float32([helpful, ANSWERS, BREVITIES]).T)
    assert re.fullmatch(r"helpful=\w{16};answer=\w{16};brevity=\w{16};sum=\w{8}", scores.weights_version)
    assert rewarding.told == list(zip(PROMPTS, LABELS, strict=True))


def test_without_prompts_and_labels_a_function_is_told_none(url: str, helpful: list[float]) -> None:
    with RewardClient(url) as client:
        np.testing.assert_array_equal(client.score(texts=TEXTS).rewards, summed(helpful, [0, 0, 0]))
    assert rewarding.told == [(None, None)] * 3


def test_labels_of_a_data_frame_arrive_as_plain_values_of_any_size(url: str) -> None:
    frame = pd.DataFrame({"label": [np.array([{"n": 1}], object), np.float32(0.1), 2**70, float("nan")]}, dtype=object)
    with RewardClient(url, model="answer") as client:
        client.score(texts=["a"] * 4, prompts=["a"] * 4, labels=frame["label"]).raise_for_failed()
        with pytest.raises(InvalidRequest, match=r"labels\[1\] cannot be written as JSON"):
            client.score(texts=["a"] * 2, labels=["a", {1, 2}])
    labels = [label for _, label in rewarding.told]
    assert labels == [[{"n": 1}], 0.1, 2**70, None]
    assert [type(label) for label in labels[:3]] == [list, float, int]


def test_a_model_that_reads_no_labels_is_sent_none(url: str) -> None:
    with RewardClient(url, model="brevity") as client:
        assert "labels" not in client.info().inputs
        np.testing.assert_array_equal(client.score(texts=TEXTS, labels=LABELS).rewards, np.float32(BREVITIES))


def test_one_text_in_two_requests_at_once_has_its_own_label(server: RunningServer) -> None:
    with RewardClient(server.http_url, model="answer") as client:
        futures = [client.submit(texts=["4"] * 3, labels=[str(i), "4", None]) for i in range(8)]
        assert [list(future.result()) for future in futures] == [[float(i == 4), 1.0, 0.0] for i in range(8)]


@pytest.mark.parametrize("library", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_tritonclient(server: RunningServer, helpful: list[float], library: Any) -> None:
    address = (server.http_url if library is tritonclient.http else server.grpc_url or "").split("://")[1]
    inputs = []
    for name, rows in (("sentences", TEXTS), ("prompts", PROMPTS), ("labels", [json.dumps(x) for x in LABELS])):
        inputs.append(library.InferInput(name, [3, 1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array(rows, dtype=np.object_).reshape(3, 1))
    with library.InferenceServerClient(address) as client:
        result = client.infer("reward_model", inputs)
        parameters = result.get_response()["parameters"] if library is tritonclient.http else None
        if parameters is None:
            parameters = {name: value.string_param for name, value in result.get_response().parameters.items()}
    np.testing.assert_array_equal(result.as_numpy("rewards")[:, 0], summed(helpful))
    np.testing.assert_array_equal(result.as_numpy("attributes"), np.float32([helpful, ANSWERS, BREVITIES]).T)
    assert parameters["attribute_names"] == "helpful,answer,brevity"
    assert parameters["weights_version"].startswith("helpful=")


def test_pytriton(url: str, helpful: list[float]) -> None:
    def column(rows: list[str]) -> np.ndarray:
        return np.char.encode(np.array(rows)[:, np.newaxis], "utf-8")

    pytriton_client = pytest.importorskip("pytriton.client", reason="nvidia-pytriton is not installed")
    with pytriton_client.ModelClient(url, "reward_model", init_timeout_s=120) as client:
        result = client.infer_batch(
            sentences=column(TEXTS), prompts=column(PROMPTS), labels=column([json.dumps(x) for x in LABELS])
        )
    np.testing.assert_array_equal(result["rewards"][:, 0], summed(helpful))


def test_token_ids_if_all_components_read_the_same(url: str, folder: Path) -> None:
    rows = zoo.rows()[:4]
    with RewardClient(url, model="of_ids") as client:
        scores = client.score(tokens=rows)
        ids = np.full((2, 70), zoo.EOS, np.int32)
        ids[0, : len(rows[0])], ids[1, : len(rows[1])] = rows[0], rows[1]
    lengths = np.array([len(row) for row in rows])
    np.testing.assert_allclose(scores.rewards, zoo.reference(folder, rows) + lengths / 100, atol=1e-5)
    np.testing.assert_array_equal(scores.attributes[:, 1], lengths)  # type: ignore[index]
    with httpx.Client(base_url=url.replace("grpc", "http")) as http:
        if url.startswith("http"):  # as trlX sends them: a row ends with its first EOS
            entry = {"name": "input_ids", "shape": [2, 70], "datatype": "INT32", "data": ids.tolist()}
            answer = http.post("/v2/models/of_ids/infer", json={"inputs": [entry]}).json()
            attributes = next(output for output in answer["outputs"] if output["name"] == "attributes")
            assert attributes["data"][1::2] == (lengths[:2] + 1).tolist()


def test_what_not_every_component_reads_is_refused(url: str) -> None:
    chat = [[{"role": "user", "content": "hi"}]]
    with RewardClient(url) as client:
        with pytest.raises(InvalidRequest, match=r"takes no input 'messages'.*send texts"):
            client.score(messages=chat)
        with pytest.raises(InvalidRequest, match="takes no input 'tokens'"):
            client.score(tokens=[[5, 6]])
    with RewardClient(url, model="of_ids") as client, pytest.raises(InvalidRequest, match="no input 'sentences'"):
        client.score(texts=["a"])
    with RewardClient(url, model="helpful") as client:
        assert len(client.score(messages=chat).raise_for_failed()) == 1


def test_a_failed_component_fails_its_sample_and_never_gives_a_part_of_the_sum(url: str, helpful: list[float]) -> None:
    texts = [TEXTS[0], "NAN", "too long " * 100, TEXTS[2]]
    with RewardClient(url) as client:
        scores = client.score(texts=texts, prompts=[PROMPTS[0], "", "", PROMPTS[2]], labels=["4", 1, 2, 3])
    expected = summed(helpful)
    np.testing.assert_array_equal(scores.rewards, [expected[0], np.nan, np.nan, expected[2]])
    assert np.isnan(scores.attributes[1:3]).all()  # type: ignore[index]
    assert scores.errors[0] is scores.errors[3] is None
    assert scores.errors[1] == "brevity: the function returned nan for this sample"
    assert re.match(r"helpful: the sample has \d+ tokens, helpful takes at most 256", scores.errors[2] or "")
    entry = {"name": "sentences", "shape": [2, 1], "datatype": "BYTES", "data": ["fine", "NAN"]}
    if url.startswith("http"):
        told = httpx.post(url + "/v2/models/reward_model/infer", json={"inputs": [entry]})
        assert (told.status_code, told.headers["guerdon-error"]) == (500, "SampleFailed")
        assert told.json()["error"].startswith("row 1: brevity: ")


def test_other_servers_forms_tell_the_same_numbers(server: RunningServer, helpful: list[float]) -> None:
    expected = summed(helpful)
    with httpx.Client(base_url=server.http_url) as http:
        body = {"query": TEXTS, "prompts": PROMPTS, "labels": LABELS}
        told = http.post("/get_reward", json=body).json()
        assert np.float32(told["rewards"]).tolist() == expected.tolist()
        assert np.float32(told["extra_logs"]["answer"]).tolist() == ANSWERS
        body = {"prompt": PROMPTS[0], "response": "4", "label": "4"}
        assert np.float32(http.post("/reward", json=body).json()) == expected[0]
        messages = [{"role": "user", "content": "x"}]
        refused = http.post("/reward", json=body | {"prompt": messages})
        assert refused.status_code == 400
        assert "takes no messages: answer, brevity cannot read them" in refused.json()["error"]


def test_a_label_that_is_not_json_is_told(server: RunningServer) -> None:
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [text]}
        for name, text in (("sentences", "a"), ("labels", "forty two"))
    ]
    told = httpx.post(server.http_url + "/v2/models/reward_model/infer", json={"inputs": inputs})
    assert told.status_code == 400
    assert "input 'labels', row 0: not valid JSON" in told.json()["error"]


def test_only_the_components_may_be_asked_for(server: RunningServer) -> None:
    asked = {
        "inputs": [{"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["abc"]}],
        "outputs": [{"name": "attributes"}],
    }
    (output,) = httpx.post(server.http_url + "/v2/models/reward_model/infer", json=asked).json()["outputs"]
    assert output["name"] == "attributes" and None not in output["data"]


def test_the_sum_describes_itself_as_any_model_does(server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url) as http:
        metadata = http.get("/v2/models/reward_model").json()
        config = http.get("/v2/models/reward_model/config").json()
        index = http.post("/v2/repository/index").json()
        assert http.get("/v2/models/reward_model/ready").status_code == 200
        assert "served here: adaptive, answer," in http.get("/v2/models/other").json()["error"]
    inputs = ["sentences", "group_ids", "prompt_lengths", "prompts", "labels"]
    assert [entry["name"] for entry in metadata["inputs"]] == inputs
    assert {entry["name"]: entry["shape"] for entry in metadata["outputs"]} == {
        "rewards": [-1, 1], "attributes": [-1, 3], "exceeded": [-1, 1], "errors": [-1, 1],
    }  # fmt: skip
    assert [(entry["name"], entry["data_type"]) for entry in config["input"]][-2:] == [
        ("prompts", "TYPE_STRING"), ("labels", "TYPE_STRING"),
    ]  # fmt: skip
    assert [(entry["name"], entry["state"]) for entry in index][:3] == [
        ("reward_model", "READY"), ("of_ids", "READY"), ("of_responses", "READY"),
    ]  # fmt: skip
    assert {entry["name"] for entry in index} == SERVED
    with tritonclient.grpc.InferenceServerClient((server.grpc_url or "").split("://")[1]) as grpc:
        assert grpc.is_model_ready("reward_model")
        assert [entry.name for entry in grpc.get_model_metadata("reward_model").inputs] == inputs
        assert {entry.name for entry in grpc.get_model_repository_index().models} == SERVED


def metric(server: RunningServer, line: str) -> float:
    text = httpx.get(server.http_url + "/metrics").text
    return float(next(rest for rest in text.splitlines() if rest.startswith(line + " ")).rpartition(" ")[2])


def test_running_statistics_and_what_the_metrics_tell_of_them(server: RunningServer) -> None:
    labels = '{component="brevity",model="adaptive"}'
    with RewardClient(server.http_url, model="adaptive") as client:
        assert list(client.score(texts=["x" * 100])) == [-1.0]  # as it is: nothing to compare it with
        assert list(client.score(texts=["x" * 300, "x" * 300, "x" * 100])) == [-1.0, -1.0, 1.0]
        client.score(texts=["NAN"])
    assert metric(server, "guerdon_component_mean" + labels) == pytest.approx(-2.0, rel=1e-6)
    assert metric(server, "guerdon_component_std" + labels) == pytest.approx(1.0, rel=1e-6)
    assert metric(server, 'guerdon_sequences_total{model="adaptive",outcome="ok"}') == 4
    assert metric(server, 'guerdon_sequences_total{model="adaptive",outcome="failed"}') == 1
    found = outcomes(server.http_url)
    assert found["adaptive", "ok"] == 3 and ("brevity", "SampleFailed") not in found
    text = httpx.get(server.http_url + "/metrics").text
    assert re.search(
        r'guerdon_model_info\{.*kind="sum",model="adaptive",.*weights_version="brevity=\w{16};sum=\w{8}"\} 1.0', text
    )


def test_the_command_writes_the_same_scores(
    server: RunningServer, helpful: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": PROMPTS[0], "responses": ["4", "five"], "label": LABELS[0]},
        {"prompt": PROMPTS[2], "response": "red", "label": LABELS[2]},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    command = ["score", str(source), "-o", str(target), "--no-progress"]
    for address in (server.http_url, server.grpc_url or ""):
        assert cli.main([*command, "--server", address]) == 0
        first, second = map(orjson.loads, target.read_bytes().splitlines())
        assert np.float32([*first["rewards"], *second["rewards"]]).tolist() == summed(helpful).tolist()
        assert second["attributes"] == [
            {"helpful": pytest.approx(helpful[2]), "answer": 0.0, "brevity": pytest.approx(BREVITIES[2])}
        ]
        assert first["label"] == "4" and first["weights_version"].startswith("helpful=")
        target.unlink()
    capsys.readouterr()


def test_the_first_sum_is_what_is_meant_without_a_name(folder: Path) -> None:
    service = build_service(configured(folder))
    assert service.catalog.scored_by("").name == "reward_model"
    assert service.catalog.scored_by("adaptive").kind == "sum"
    assert service.catalog.scored_by(str(folder)).name == service.catalog.scored_by("helpful").name == "helpful"


@contextlib.asynccontextmanager
async def running(*components: dict[str, Any], **of_function: Any) -> AsyncIterator[Service]:
    """A service of two functions, `of_function` the settings of the one that can be made to wait, and their sum."""
    config = from_mapping(
        ServerConfig,
        {
            "models": [
                {"model": "rewarding:brevity", "name": "brevity", **of_function},
                {"model": "rewarding:answer", "name": "answer"},
            ],
            "rewards": [{"components": list(components) or [{"model": "brevity"}, {"model": "answer"}]}],
        },
    )
    service = build_service(config)
    service.start()
    try:
        yield service
    finally:
        rewarding.hold.set()
        await asyncio.to_thread(service.stop)


async def test_the_deadline_covers_all_components() -> None:
    async with running() as service:
        with pytest.raises(DeadlineExceeded, match=r"within the 0\.05 s"):
            await service.score("reward_model", ScoreRequest(texts=["WAIT"], timeout_s=0.05))
        assert not [line for line in service.metrics.render().decode().splitlines() if "component_mean{" in line]


async def test_whoever_leaves_costs_no_component_anything() -> None:
    async with running(max_batch_tokens=1) as service:
        first = asyncio.create_task(service.score("brevity", ScoreRequest(texts=["WAIT"])))
        await until(rewarding.is_held.is_set)
        gone = asyncio.create_task(service.score("reward_model", ScoreRequest(texts=["a", "b", "c"])))
        # One thread computes, and waits.
        await until(lambda: service.loops.depth() == {"brevity": (3, 3), "answer": (3, 3)})
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert service.loops.depth() == {"brevity": (0, 0), "answer": (0, 0)}
        rewarding.hold.set()
        await first
        await service.score("brevity", ScoreRequest(texts=["d"]))
    assert rewarding.told == []


async def test_where_one_component_is_full_the_others_drop_the_request_too() -> None:
    async with running({"model": "answer"}, {"model": "brevity"}, max_queue_sequences=2) as service:
        first = asyncio.create_task(service.score("brevity", ScoreRequest(texts=["WAIT"])))
        await until(rewarding.is_held.is_set)
        waiting = asyncio.create_task(service.score("brevity", ScoreRequest(texts=["a", "b"])))
        await until(lambda: service.loops.depth()["brevity"][0] == 2)
        with pytest.raises(Overloaded, match="brevity: the queue has no room for 1 more") as refused:
            await service.score("reward_model", ScoreRequest(texts=["c"]))
        assert refused.value.retry_after_s == 1.0
        assert service.loops.depth()["answer"] == (0, 0)
        rewarding.hold.set()
        await asyncio.gather(first, waiting)
        reply = await service.score("reward_model", ScoreRequest(texts=["c"]))
        assert isinstance(reply.results[0], Score)


async def test_priorities_hold_for_the_components() -> None:
    async with running(max_batch_tokens=1) as service:
        first = asyncio.create_task(service.score("brevity", ScoreRequest(texts=["WAIT"])))
        await until(rewarding.is_held.is_set)
        done: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await service.score("reward_model", ScoreRequest(texts=["a", "b"], priority=priority))
            done.append(name)

        tasks = [asyncio.create_task(ask("low", 0)), asyncio.create_task(ask("high", 5))]
        await until(lambda: {n for n, _ in service.loops.depth().values()} == {4})
        rewarding.hold.set()
        await asyncio.gather(first, *tasks)
    assert done == ["high", "low"]


async def test_a_request_of_no_samples() -> None:
    async with running() as service:
        with pytest.raises(InvalidRequest, match="no samples"):
            await service.score("reward_model", ScoreRequest())


async def test_a_batch_of_two_requests_fails_no_neighbour_of_the_other() -> None:
    async with running() as service:
        requests = [["NAN", "a"], ["bb"], ["NAN"]]
        replies = await asyncio.gather(*(service.score("reward_model", ScoreRequest(texts=t)) for t in requests))
    kinds = [[type(result) for result in reply.results] for reply in replies]
    assert kinds == [[SampleFailed, Score], [Score], [SampleFailed]]
    assert all("brevity: " in str(r) for reply in replies for r in reply.results if isinstance(r, GuerdonError))


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_client_that_gives_up_is_not_waited_for(server: RunningServer, kind: str) -> None:
    url = server.http_url if kind == "http" else server.grpc_url or ""
    before = outcomes(server.http_url)
    with RewardClient(url, policy=RetryPolicy(tries=1)) as client, pytest.raises(DeadlineExceeded):
        client.score(texts=["WAIT"], timeout_s=0.3)
    rewarding.hold.set()

    def counted() -> bool:
        now = outcomes(server.http_url)
        return sum(now.values()) == sum(before.values()) + 1

    wait_until(counted)
    assert {key for key, n in outcomes(server.http_url).items() if n != before.get(key, 0)} <= {
        ("reward_model", "DeadlineExceeded"),
        ("reward_model", "Cancelled"),
        ("unknown", "Cancelled"),  # before the server had read whom it asks
    }


def test_many_at_once_over_both_transports(server: RunningServer, helpful: list[float]) -> None:
    expected = summed(helpful)
    wrong: list[Any] = []

    def ask(url: str) -> None:
        with RewardClient(url) as client:
            futures = [client.submit(texts=TEXTS, prompts=PROMPTS, labels=LABELS) for _ in range(25)]
            wrong.extend(f.result().rewards for f in futures if not np.allclose(f.result().rewards, expected))

    threads = [threading.Thread(target=ask, args=(url,)) for url in (server.http_url, server.grpc_url or "") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_function_with_a_parameter_that_nobody_fills_cannot_start() -> None:
    with pytest.raises(CheckpointError, match="rewarding:unknown has an unknown parameter metadata") as caught:
        build_service(ServerConfig(models=[ModelConfig(model="rewarding:unknown")]))
    assert "`prompts` and `labels`" in caught.value.help


def test_components_that_read_nothing_in_common_cannot_start() -> None:
    models = [{"model": f"rewarding:{name}", "name": name} for name in ("brevity", "length")]
    rewards = [{"components": [{"model": "brevity"}, {"model": "length"}]}]
    with pytest.raises(ConfigError, match="brevity reads text; length reads token ids") as caught:
        build_service(from_mapping(ServerConfig, {"models": models, "rewards": rewards}))
    assert "`texts`" in caught.value.help


def test_what_cannot_be_a_sum_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("models: [{model: ./absent, name: a}]\nrewards: [{components: [{model: b}]}]\n")
    assert cli.main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "rewards[0].components[0].model is 'b'" in error
    assert "help: use one of their names: a" in error


def test_the_yaml_of_the_help_is_one_and_the_start_names_the_sums(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = helps.SERVE_NOTES.split("\n\n")[1]
    file = tmp_path / "server.yaml"
    file.write_text(text)
    from guerdon.settings import sources

    config = sources.read_server_settings(cli.make_parser().parse_args(["serve", "--config", str(file)]))
    assert [part.model for part in config.rewards[0].components] == ["helpful", "safe", "short"]
    info = build_service(configured(folder)).catalog.scored_by("")
    assert console.describe_model(info).startswith(
        "reward_model: sum of 0.5 helpful + 3 answer + 0.1 brevity, weights helpful="
    )


def test_a_function_of_responses_reads_texts_without_their_prompts_and_the_last_messages(url: str) -> None:
    texts = [f"{prompt}the label is {text.removeprefix(prompt)}" for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    labels = ["two", "five", "red"]  # "two" stands in the first prompt alone
    messages = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": text.removeprefix(prompt)}]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    with RewardClient(url, "of_responses") as client, RewardClient(url, "helpful") as helpful:
        by_text = client.score(texts=texts, prompts=PROMPTS, labels=labels)
        assert by_text.attributes is not None and by_text.attributes[:, 1].tolist() == [0.0, 1.0, 1.0]
        by_message = client.score(messages=messages, labels=labels)
        assert by_message.attributes is not None and by_message.attributes[:, 1].tolist() == [0.0, 1.0, 1.0]
        assert by_message.attributes[:, 0].tolist() == helpful.score(messages=messages).rewards.tolist()
    with RewardClient(url, "words") as client:
        chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": [{"type": "text", "text": "two"}]}]
        # The prompt is told as well, and no part of the message.
        assert list(client.score(messages=[chat], prompts=["two"], labels=["two"])) == [1.0]
        scores = client.score(messages=[chat[:1], chat], labels=["two", "two"])
        assert list(scores)[1] == 1.0 and np.isnan(scores.rewards[0])
        assert "the last message is the user's, not the assistant's" in str(scores.errors[0])


def test_a_function_of_responses_needs_the_prompt_that_its_text_begins_with(url: str) -> None:
    with RewardClient(url, "words") as client:
        scores = client.score(texts=["two two", "four: two"], prompts=["two ", "five: "], labels=["two", "two"])
        assert next(iter(scores)) == 1.0 and np.isnan(scores.rewards[1])
        assert "the text, 'four: two', does not begin with its prompt, 'five: '" in str(scores.errors[1])
        (error,) = client.score(texts=["two two"], labels=["two"]).errors
        assert "this text's prompt was not sent: send `prompts`" in str(error)


def test_what_a_function_needs_and_was_not_told_fails_its_sample_alone(url: str) -> None:
    with RewardClient(url, "words") as client:
        labels = ["b", None, float("nan"), pd.NA]
        scores = client.score(texts=["a b"] * 4, prompts=["a"] * 4, labels=labels)
        assert next(iter(scores)) == 1.0 and np.isnan(scores.rewards[1:]).all()
        for error in scores.errors[1:]:
            assert "this sample's label was not sent, or is null or NaN: send `labels`" in str(error)
        assert "label was not sent" in str(client.score(texts=["a b"], prompts=["a"]).errors[0])
    with RewardClient(url, "pairs") as client:
        assert "pairs reads prompts" in str(client.score(tokens=[[5, 6]]).errors[0])
        assert list(client.score(tokens=[[5, 6]], prompts=["abc"])) == [5.0]


async def test_others_have_their_turn_between_a_sums_components(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        turns, seen, score = 0, [], service.score

        async def noted(name: str, *asked: Any, **more: Any) -> ScoreReply:
            seen.extend([turns] if more else [])
            return await score(name, *asked, **more)

        monkeypatch.setattr(service, "score", noted)
        summed = asyncio.create_task(service.score("reward_model", ScoreRequest(texts=["a"])))
        while not summed.done():
            await asyncio.sleep(0)
            turns += 1
    assert len(set(seen)) == 2


@pytest.mark.parametrize(("name", "returned"), [("average", "a single number"), ("single", "1 rewards")])
async def test_numbers_that_belong_to_no_sample_are_no_samples_rewards(name: str, returned: str) -> None:
    service = build_service(ServerConfig(models=[ModelConfig(model=f"rewarding:{name}")]))
    service.start()
    try:
        reply = await service.score("reward_model", ScoreRequest(texts=["a", "bcd", "ef"]))
        alone = (await service.score("reward_model", ScoreRequest(texts=["a"]))).results[0]
    finally:
        await asyncio.to_thread(service.stop)
    assert isinstance(alone, Score) == (name == "single")
    assert [type(result) for result in reply.results] == [SampleFailed] * 3
    assert f"returned {returned} for 3 samples" in str(reply.results[0])


@pytest.mark.parametrize("name", ["deferred", "generated", "called"])
def test_a_function_whose_call_gives_no_numbers_cannot_start(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"rewarding:{name} is asynchronous, or a generator"):
        build_service(ServerConfig(models=[ModelConfig(model=f"rewarding:{name}")]))


@pytest.mark.parametrize("option", [{"add_special_tokens": True}, {"truncation": Truncation(2, "right")}])
async def test_what_is_done_to_tokens_is_refused_for_a_function_of_texts(option: dict[str, Any]) -> None:
    async with running() as service:
        for name in ("brevity", "reward_model"):
            with pytest.raises(InvalidRequest, match="brevity reads texts, not tokens"):
                await service.score(name, ScoreRequest(texts=["abc"], **option))


def test_a_models_name_goes_before_anothers_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    models = [{"model": "helpful", "name": "a"}, {"model": "rewarding:brevity", "name": "helpful"}]
    more = [{"model": "rewarding:length", "name": name} for name in ("b", "c")]
    service = build_service(from_mapping(ServerConfig, {"models": [*models, *more]}))
    assert service.catalog.scored_by("helpful").kind == "function"
    assert service.catalog.scored_by("rewarding:brevity").name == "helpful"
    with pytest.raises(UnknownModel, match=r"several models were loaded from 'rewarding:length'.* name: b, c"):
        service.catalog.scored_by("rewarding:length")


async def test_a_sums_components_count_their_time_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        started, score = [], service.score

        async def noted(*asked: Any, **more: Any) -> ScoreReply:
            started.append(more.get("started"))
            return await score(*asked, **more)

        monkeypatch.setattr(service, "score", noted)
        await service.score("reward_model", ScoreRequest(texts=["a"]))
    started.remove(None)  # the sum itself
    assert len(started) == 2 and len(set(started)) == 1
