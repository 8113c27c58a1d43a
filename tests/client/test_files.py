"""Files scored through a real server."""

import asyncio
import gzip
import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from guerdon.client import RetryPolicy, RewardClient, Scores
from guerdon.client import score_file as window
from guerdon.client.jsonl import ADDED, read_rows, samples_of
from guerdon.client.score_file import score_file
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.errors import (
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    SampleFailed,
    ServerFault,
    StartError,
    StorageFailed,
    Unavailable,
    Unreachable,
)
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from server.echo_service import EchoService


class Service(EchoService):
    """The echo service; texts with "bad" fail, requests with "wrong" are refused, and it keeps all that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ScoreRequest] = []
        self.failures: list[GuerdonError] = []
        self.weights_version = "1"
        self.room = 1_000_000
        self.in_progress = self.num_refused = 0

    async def score(self, name: str, request: ScoreRequest, client: str = "", **more: Any) -> ScoreReply:
        self.seen.append(request)
        if any("wrong" in text for text in request.texts or ()):
            raise InvalidRequest("this is wrong")
        if self.failures:
            raise self.failures.pop(0)
        if self.in_progress and self.in_progress + len(request) > self.room:
            self.num_refused += 1
            raise Overloaded("full", 0.0)
        self.in_progress += len(request)
        try:
            if self.room < 1_000_000:
                await asyncio.sleep(0.005)
            reply = await super().score(name, request, client, **more)
        finally:
            self.in_progress -= len(request)
        reply.weights_version = self.weights_version
        for i, text in enumerate(request.texts or ()):
            if "bad" in text:
                reply.results[i] = SampleFailed("not finite")
        return reply


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Service, RewardClient]]:
    service = Service()
    with (
        RunningServer(service, ServerConfig(port=0, grpc_port=None), grace_s=0.1) as server,
        RewardClient(server.http_url) as client,
    ):
        yield service, client


@pytest.fixture
def service(running: tuple[Service, RewardClient]) -> Service:
    service = running[0]
    service.seen.clear()
    service.failures, service.weights_version, service.room = [], "1", 1_000_000
    return service


@pytest.fixture
def client(running: tuple[Service, RewardClient]) -> RewardClient:
    return running[1]


def write(path: Path, rows: list[Any]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def orjson_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("row", "template", "sent"),
    [
        ({"prompt": "ab", "responses": ["c", "de"]}, False, ["abc", "abde"]),
        ({"prompt": "ab", "response": "c"}, False, ["abc"]),
        ({"prompt": "ab", "response": "c"}, True, [chat("ab", "c")]),
        ({"prompt": "ab", "chosen": "c", "rejected": "d"}, False, ["abc", "abd"]),
        ({"chosen": "c", "rejected": "d"}, True, ["c", "d"]),
        ({"prompt": chat("ab"), "responses": ["c"]}, False, [chat("ab", "c")]),
        ({"prompt": chat("ab"), "responses": [chat("", "c")[1:]]}, False, [chat("ab", "c")]),
        ({"prompt": chat("ab", "c"), "responses": ["d", "e"]}, False, [chat("ab", "cd"), chat("ab", "ce")]),
        ({"prompt": "ab", "chosen": chat("b", "c"), "rejected": chat("d")}, False, [chat("b", "c"), chat("d")]),
        ({"messages": chat("ab", "c")}, False, [chat("ab", "c")]),
        ({"text": "abc"}, True, ["abc"]),
    ],
)  # fmt: skip
def test_every_form_of_row(
    tmp_path: Path, service: Service, client: RewardClient, row: dict, template: bool, sent: list
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"id": 7, **row}]), tmp_path / "out.jsonl"
    summary = score_file(client, source, target, template=template, progress=False)
    (request,) = service.seen
    assert (request.texts or request.messages) == sent
    assert request.groups is None  # the server finds shared prefixes by itself
    rewards = [float(len(sample if isinstance(sample, str) else str(sample))) for sample in sent]
    added = {"rewards": rewards, "weights_version": "1"} | ({"template": True} if template else {})
    assert read(target) == [{"id": 7, **row, **added}]
    assert (summary.num_rows, summary.num_samples, summary.num_failed) == (1, len(sent), 0)
    assert summary.mean == sum(rewards) / len(rewards)


def test_rows_come_out_in_order_and_failures_are_null(tmp_path: Path, client: RewardClient) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"p{i}", "responses": ["x" * (i % 9), "y"]} for i in range(500)]
    rows[3]["responses"] = ["bad", "good"]
    rows[4]["responses"] = []
    rows[5] = {"text": "wrong"}
    target = tmp_path / "out.jsonl"
    summary = score_file(client, write(tmp_path / "in.jsonl.gz", rows), target, progress=False)
    out = read(target)
    assert [{k: v for k, v in row.items() if k not in ADDED} for row in out] == rows
    assert out[499]["rewards"] == [4.0 + 499 % 9, 5.0]
    assert (out[3]["rewards"], out[3]["errors"]) == ([None, 6.0], ["not finite", None])
    assert out[4]["rewards"] == []
    assert (out[5]["rewards"], out[5]["errors"]) == ([None], ["this is wrong"])
    assert (summary.num_rows, summary.num_samples, summary.num_failed) == (500, 997, 2)
    assert "2 failed, the first: not finite" in str(summary)


def test_attributes_with_names_are_written_as_an_object(tmp_path: Path) -> None:
    class Named:
        names: tuple[str, ...] = ("helpful", "brevity")

        def submit(self, **samples: Any) -> Future[Scores]:
            future: Future[Scores] = Future()
            rewards, attributes = np.float32([1.5, np.nan]), np.float32([[1, 0.1], [np.nan, np.nan]])
            future.set_result(Scores(rewards, [None, "bad"], attributes, attribute_names=self.names))
            return future

    scorer, source = Named(), write(tmp_path / "in.jsonl", [{"prompt": "p", "responses": ["a", "b"]}])
    score_file(scorer, source, tmp_path / "named.jsonl", progress=False)
    (row,) = read(tmp_path / "named.jsonl")
    assert row["attributes"] == [{"helpful": 1.0, "brevity": 0.1}, {"helpful": None, "brevity": None}]
    scorer.names = ()
    score_file(scorer, source, tmp_path / "plain.jsonl", progress=False)
    (row,) = read(tmp_path / "plain.jsonl")
    assert row["attributes"] == [[1.0, 0.1], [None, None]]


def test_prompts_and_labels_of_the_rows_go_with_them(tmp_path: Path) -> None:
    class Keeping:
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        def submit(self, **samples: Any) -> Future[Scores]:
            self.seen.append({name: samples.get(name) for name in ("prompts", "labels")})
            future: Future[Scores] = Future()
            n = len(samples.get("texts") or samples["messages"])
            failed = [None] * (n - 1) + ["no" if len(self.seen) < 3 else None]
            future.set_result(Scores(np.where([e is None for e in failed], 1, np.nan).astype(np.float32), failed))
            return future

    rows = [
        {"prompt": "p", "responses": ["a", "b"], "label": 42},
        {"prompt": "p", "response": "c"},
        {"text": "t", "label": {"x": 1}},
        {"prompt": chat("q"), "response": "d"},
    ]
    scorer, source = Keeping(), write(tmp_path / "in.jsonl", rows)
    score_file(scorer, source, tmp_path / "out.jsonl", progress=False)
    whole = [
        {"prompts": ["p", "p", "p"], "labels": [42, 42, None]},
        {"prompts": None, "labels": [{"x": 1}]},
        {"prompts": None, "labels": None},
    ]
    assert scorer.seen == whole
    score_file(scorer, source, tmp_path / "out.jsonl", progress=False, retry_failed=True)
    # Behind the first row, which is sent again because its weights are to be compared.
    first = {"prompts": ["p", "p"], "labels": [42, 42]}
    assert scorer.seen[3:] == [first, {"prompts": ["p"], "labels": None}, whole[1]]


def test_neighbouring_rows_of_one_prompt_go_together(tmp_path: Path, service: Service, client: RewardClient) -> None:
    rows = [{"prompt": p, "response": r} for p, r in (("a", "1"), ("a", "2"), ("b", "3"), ("a", "4"))]
    score_file(client, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", progress=False)
    assert sorted(tuple(request.texts or ()) for request in service.seen) == [("a1", "a2"), ("a4",), ("b3",)]
    assert [row["rewards"] for row in read(tmp_path / "out.jsonl")] == [[2.0]] * 4


@pytest.mark.parametrize("cut", [b"", b'{"text":"t40","rew', b'{"text":"t40","rewards":[3.0]}'])
def test_a_run_goes_on_after_its_last_whole_row(
    tmp_path: Path, service: Service, client: RewardClient, cut: bytes
) -> None:
    rows = [{"text": "bad" if i == 2 else f"t{i}", "rewards": "an input's own field"} for i in range(100)]
    source, target, whole = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    score_file(client, source, whole, progress=False)
    service.seen.clear()
    lines = whole.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:40]) + cut)
    summary = score_file(client, source, target, progress=False)
    assert target.read_bytes() == whole.read_bytes()
    assert [request.texts for request in service.seen].count(["t0"]) == 1  # to learn the version of the weights
    assert len(service.seen) == 61
    assert (summary.num_resumed, summary.num_rows, summary.num_failed) == (40, 100, 1)
    assert score_file(client, source, target, progress=False).num_resumed == 100
    assert len(service.seen) == 62


def test_an_output_of_another_input_is_left_alone(tmp_path: Path, service: Service, client: RewardClient) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out.jsonl"
    for content, line in (
        ('{"text":"a","rewards":[1.0]}\n{"text":"x","rewards":[1.0]}\n', 2),
        ('{"text":"a"}\n', 1),
        ('{"text":"a","rewards":1.0}\n', 1),
        ('{"text":"a","rewards":[1.0,2.0]}\n', 1),
        ('{"text":"a","rewards":["x"]}\n', 1),
        ("notes without a newline", 1),
        ('{"text":"a"}', 1),
        ('{"text":"a","rewards":[1.0]}\n{"text":"a","rew', 2),
        ("hello\n", 1),
        ('{"text":"a","rewards":[1]}\n{"text":"b","rewards":[1]}\n{"text":"c","rewards":[1]}\n', 3),
    ):
        target.write_text(content)
        with pytest.raises(StartError, match=f"out.jsonl, line {line}: .*of another input"):
            score_file(client, source, target, progress=False)
        assert target.read_text() == content
    assert not service.seen


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "a"}', "none of the forms"),
        *(
            (f'{{"{key}": "a", "chosen": "b", "rejected": "c"}}', f"the key '{key}' and no prompt; did you mean prompt")
            for key in ("promt", "prompts", "Prompt")
        ),
        *(
            (f'{{"{key}": {value}, {answers}}}', f"it has {key} and no prompt; call {key} prompt")
            for key, value in (("question", '"a"'), ("messages", '[{"role": "user", "content": "a"}]'), ("text", '"a"'))
            for answers in ('"chosen": "b", "rejected": "c"', '"response": "b"', '"responses": ["b", "c"]')
            if key != "question" or "chosen" in answers
        ),
        ('{"text": "a", "label": 123456789012345678901234567890}', "more than 64 bits"),
        ('{"text": "a", "labels": [18446744073709551616]}', "more than 64 bits"),
        ('{"prompt": "a", "responses": "b"}', "responses is not a list"),
        ('{"prompt": "a", "responses": ["b", 3]}', "a response is a int"),
        ('{"prompt": "a", "responses": ["b", [{"role": "user", "content": "c"}]]}', "both texts and messages"),
        *(
            (
                f'{{"messages": [{{"role": "user", "content": "a"}}], "{key}": {value}}}',
                f"it has {key}, which servers do not",
            )
            for key, value in (("tools", '[{"name": "f"}]'), ("chat_template_kwargs", '{"thinking": false}'))
        ),
        (
            '{"prompt": [{"role": "system", "content": "s"}], "response": [{"role": "user", "content": "a"}]}',
            "not as its prompt",
        ),
        ('{"messages": [{"role": "user"}]}', "a role and a content"),
        ('{"messages": []}', "at least one"),
    ],
)
def test_a_malformed_row_is_named_before_anything_is_scored(
    tmp_path: Path, service: Service, client: RewardClient, row: str, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"text": "a"}}\n\n{row}\n')
    with pytest.raises(StartError, match=f"in.jsonl, line 3: .*{message}"):
        score_file(client, source, tmp_path / "out.jsonl", progress=False)
    assert not service.seen
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a", "chosen": "a b", "rejected": "a c"},
        {"messages": chat("a", "b"), "chosen": chat("a", "b"), "rejected": chat("a", "c")},
        {"messages": chat("a", "b"), "response": "b", "question": "a"},
        {"text": "a b", "response": "b"},
        {"text": "a", "response": None, "query": None, "tools": ["f"]},
        {"messages": chat("a", "b"), "tools": [], "chat_template_kwargs": None},
        {"prompt": chat("a"), "chosen": chat("a", "b"), "rejected": chat("a", "c")},
        {"text": "1" * 40, "label": 18446744073709551615, "share": 0.12345678901234567890, "more": ["1" * 20, 1e300]},
    ],
)
def test_samples_that_are_whole_may_have_their_parts_beside_them(tmp_path: Path, row: dict[str, Any]) -> None:
    ((line, read_back),) = read_rows(write(tmp_path / "in.jsonl", [row]))
    assert read_back == row
    assert samples_of(row, Path("in.jsonl"), line, False)[0] == row.get("chosen", row.get("messages", row.get("text")))


def test_paths_that_cannot_be(tmp_path: Path, client: RewardClient) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(StartError, match="cannot read"):
        score_file(client, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    for damaged in (whole[:-20], whole[:10] + b"\xff" + whole[11:]):
        (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
        with pytest.raises(StartError, match="cannot read"):
            score_file(client, tmp_path / "damaged.jsonl.gz", tmp_path / "out.jsonl")
    for target in (source, tmp_path / "out.jsonl.gz", tmp_path / "no folder" / "out.jsonl", tmp_path):
        with pytest.raises(StartError, match="cannot write to"):
            score_file(client, source, target)


def test_the_input_is_never_the_output(tmp_path: Path, client: RewardClient, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text":"a"}')
    (tmp_path / "symbolic.jsonl").symlink_to(source)
    os.link(source, tmp_path / "hard.jsonl")
    monkeypatch.chdir(tmp_path)
    for target in ("in.jsonl", "symbolic.jsonl", "hard.jsonl", f"../{tmp_path.name}/in.jsonl"):
        with pytest.raises(StartError, match="cannot write to"):
            score_file(client, source, target, progress=False)
        assert source.read_text() == '{"text":"a"}'


def test_a_pipe_is_no_input(tmp_path: Path, client: RewardClient) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(StartError, match="is not a regular file"):
        score_file(client, tmp_path / "pipe.jsonl", tmp_path / "out.jsonl", progress=False)


@pytest.mark.parametrize("room", [8, 40])
def test_a_full_queue_slows_the_run_down_and_never_ends_it(
    tmp_path: Path, service: Service, client: RewardClient, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_LEAST_PAUSE_S", 0.01)
    service.room, service.num_refused = room, 0
    rows = [{"prompt": f"p{i}", "responses": ["x" * (i % 7)] * 4} for i in range(150)]
    with RewardClient(client._arguments[0], policy=RetryPolicy(tries=1)) as hasty:
        summary = score_file(hasty, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", progress=False)
    assert service.num_refused > 0
    assert (summary.num_samples, summary.num_failed) == (600, 0)
    assert [row["rewards"] for row in read(tmp_path / "out.jsonl")] == [
        [float(len(f"p{i}") + i % 7)] * 4 for i in range(150)
    ]


@pytest.mark.slow
def test_samples_on_their_way_are_bounded(tmp_path: Path, client: RewardClient) -> None:
    pending: list[Future[Scores]] = []

    class Counting:
        most = 0

        def submit(self, **samples: Any) -> Future[Scores]:
            future = client.submit(**samples)
            pending.append(future)
            self.most = max(self.most, sum(not f.done() for f in pending))
            return future

    counting = Counting()
    source = write(tmp_path / "in.jsonl", [{"text": f"t{i}"} for i in range(300)])
    score_file(counting, source, tmp_path / "out.jsonl", progress=False, max_in_flight=10)
    assert len(pending) == 300
    assert 1 < counting.most <= 10


@pytest.mark.parametrize("error", [ServerFault("a bug"), DeadlineExceeded("late")])
def test_an_error_that_is_not_the_rows_ends_the_run_and_is_not_written(
    tmp_path: Path, service: Service, client: RewardClient, error: GuerdonError
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out.jsonl"
    service.failures = [error]
    with pytest.raises(type(error), match=str(error)):
        score_file(client, source, target, progress=False)
    score_file(client, source, target, progress=False)
    assert [row["rewards"] for row in read(target)] == [[1.0], [1.0]]


def test_failed_rows_stay_until_they_are_to_be_retried(tmp_path: Path, service: Service, client: RewardClient) -> None:
    rows = [{"prompt": f"p{i}", "responses": ["a", "bc"]} for i in range(9)]
    source, target, whole = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    score_file(client, source, whole, progress=False)
    lines = whole.read_bytes().splitlines(keepends=True)
    partly = {"rewards": [None, 4.0], "errors": ["not finite", None], "weights_version": "1"}
    lines[2] = orjson_line(rows[2] | partly)
    lines[5] = orjson_line(rows[5] | {"rewards": [None, None], "errors": ["wrong", "wrong"]})
    target.write_bytes(b"".join(lines[:7]))
    assert score_file(client, source, target, progress=False).num_failed == 3
    service.seen.clear()
    service.failures = [ServerFault("a bug")]
    before = target.read_bytes()
    with pytest.raises(ServerFault):
        score_file(client, source, target, progress=False, retry_failed=True)
    assert target.read_bytes() == before
    service.seen.clear()
    assert score_file(client, source, target, progress=False, retry_failed=True).num_failed == 0
    # What the call before had sent already when it failed may be seen only now, a second time.
    assert {tuple(seen.texts) for seen in service.seen} - {("p0a", "p0bc")} == {("p2a", "p2bc"), ("p5a", "p5bc")}
    assert target.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_rows_of_other_weights_or_another_template_are_not_continued(
    tmp_path: Path, service: Service, client: RewardClient
) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    score_file(client, source, target, progress=False)
    first = target.read_bytes().splitlines(keepends=True)[0]
    target.write_bytes(first)
    service.weights_version = "2"
    with pytest.raises(StartError, match="of weights 1, and the server has weights 2"):
        score_file(client, source, target, progress=False)
    service.weights_version = "1"
    with pytest.raises(StartError, match="line 1: scored without --template"):
        score_file(client, source, target, progress=False, template=True)
    assert target.read_bytes() == first
    target.unlink()
    score_file(client, source, target, progress=False, template=True)
    with pytest.raises(StartError, match="line 1: scored with --template"):
        score_file(client, source, target, progress=False)


ROW, VERSIONLESS = {"text": "a", "rewards": [1.0], "weights_version": "1"}, {"text": "a", "rewards": [1.0]}


@pytest.mark.parametrize(
    ("rows", "now", "message"),
    [
        ([ROW, ROW], "2", "of weights 1, and the server has weights 2"),
        ([ROW], "2", "of weights 1, and the server has weights 2"),
        ([ROW, ROW | {"weights_version": "3"}], "1", "of weights 1, and line 2 of it has weights 3"),
        ([ROW, VERSIONLESS], "1", "of weights 1, and line 2 of it has weights without a version"),
        ([VERSIONLESS, ROW], "1", "of weights without a version, and line 2 of it has weights 1"),
        ([VERSIONLESS, VERSIONLESS], "1", "of weights without a version, and the server has weights 1"),
        ([ROW, ROW], "", "of weights 1, and the server has weights without a version"),
        ([{"text": "a", "rewards": [None], "errors": ["no"]}, ROW], "2", "of weights 1, and the server has weights 2"),
    ],
)
@pytest.mark.parametrize("retry_failed", [False, True])
def test_every_row_names_the_weights_of_the_server(
    rows: list[Any], now: str, message: str, retry_failed: bool, tmp_path: Path, service: Service, client: RewardClient
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"text": "a"}] * 2), write(tmp_path / "out.jsonl", rows)
    service.weights_version, before = now, target.read_bytes()
    with pytest.raises(StartError, match=message):
        score_file(client, source, target, progress=False, retry_failed=retry_failed)
    assert target.read_bytes() == before


def test_rows_without_a_reward_need_no_version(tmp_path: Path, service: Service, client: RewardClient) -> None:
    refused = {"text": "wrong", "rewards": [None], "errors": ["this is wrong"]}
    source = write(tmp_path / "in.jsonl", [{"text": "wrong"}, {"text": "a"}])
    target = write(tmp_path / "out.jsonl", [refused, ROW])
    before = target.read_bytes()
    assert score_file(client, source, target, progress=False).num_failed == 1
    target.write_bytes(before.splitlines(keepends=True)[0])
    assert score_file(client, source, target, progress=False).num_failed == 1
    assert read(target) == [refused, ROW]


def test_a_row_that_the_model_now_refuses_is_another_models(
    tmp_path: Path, service: Service, client: RewardClient
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"text": "wrong"}]), tmp_path / "out.jsonl"
    write(target, [{"text": "wrong", "rewards": [1.0], "weights_version": "1"}])
    with pytest.raises(StartError, match="rewards of a row that the model refuses: this is wrong"):
        score_file(client, source, target, progress=False)


def test_the_same_weights_with_other_settings_are_said(
    tmp_path: Path, service: Service, client: RewardClient, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"text": "a"}]), tmp_path / "out.jsonl"
    for reward, says in ((1.001, False), (1.5, True)):
        write(target, [ROW | {"rewards": [reward]}])
        score_file(client, source, target, progress=False)
        assert ("did it have other settings?" in caplog.text) == says


@pytest.mark.parametrize("rows", [[{"text": "a"}, {"text": "b"}], [{"text": "b"}, {"text": "b"}], [{"text": "b"}] * 3])
def test_rows_in_another_order_and_doubled_rows_are_another_input(
    rows: list[Any], tmp_path: Path, service: Service, client: RewardClient
) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "b"}, {"text": "a"}])
    target = write(tmp_path / "out.jsonl", [row | {"rewards": [1.0], "weights_version": "1"} for row in rows])
    with pytest.raises(StartError, match="of another input"):
        score_file(client, source, target, progress=False)
    assert not service.seen


@pytest.mark.parametrize("error", [ServerFault("a bug"), KeyboardInterrupt()])
def test_a_run_that_fails_before_its_first_row_leaves_no_file(
    error: BaseException, tmp_path: Path, client: RewardClient
) -> None:
    class Failing:
        def submit(self, **samples: Any) -> Future[Scores]:
            raise error

    source, target = write(tmp_path / "in.jsonl", [{"text": "a"}]), tmp_path / "out.jsonl"
    with pytest.raises(type(error)):
        score_file(Failing(), source, target, progress=False)
    assert not target.exists()
    target.touch()  # a file that was there stays
    with pytest.raises(type(error)):
        score_file(Failing(), source, target, progress=False)
    assert target.exists()
    write(source, [])
    assert score_file(client, source, tmp_path / "empty.jsonl", progress=False).num_rows == 0
    assert (tmp_path / "empty.jsonl").exists()


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """Three rows on stdin, and what comes out of stdout."""
    out = io.BytesIO()
    rows = b"".join(orjson_line({"text": text}) for text in "abc")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(rows)))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=out))
    return out


def test_changed_weights_are_reported_without_a_file_on_stdout(
    service: Service, client: RewardClient, piped: io.BytesIO
) -> None:
    class Changing:
        def submit(self, **samples: Any) -> Future[Scores]:
            future: Future[Scores] = Future()
            version = "2" if samples["texts"] == ["b"] else "1"
            future.set_result(Scores(np.ones(1, np.float32), [None], weights_version=version))
            return future

    with pytest.raises(StartError, match=r"^the server's weights changed from 1 to 2$") as raised:
        score_file(Changing(), "-", "-", progress=False)
    assert raised.value.help == "score again"


def test_a_full_disk_is_named(
    client: RewardClient, piped: io.BytesIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=full))
        with pytest.raises(StorageFailed, match=r"^cannot write stdout: No space left on device$"):
            score_file(client, "-", "-", progress=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(
        StorageFailed, match=r"^cannot keep stdin in .*none: No such file .*; make room there, or set TMPDIR"
    ):
        score_file(client, "-", "-", progress=False)


def test_a_server_that_is_gone_ends_the_run_and_the_next_one_goes_on(tmp_path: Path, client: RewardClient) -> None:
    class Breaking:
        """Scores 30 requests, then the server is gone."""

        def __init__(self) -> None:
            self.left = 30

        def submit(self, **samples: Any) -> Future[Scores]:
            self.left -= 1
            if self.left >= 0:
                return client.submit(**samples)
            failed: Future[Scores] = Future()
            failed.set_exception(Unreachable("gone"))
            return failed

    source = write(tmp_path / "in.jsonl", [{"text": f"t{i}"} for i in range(100)])
    target = tmp_path / "out.jsonl"
    with pytest.raises(Unavailable, match="gone"):
        score_file(Breaking(), source, target, progress=False)
    assert len(read(target)) == 30
    assert score_file(client, source, target, progress=False).num_resumed == 30
    assert [row["rewards"] for row in read(target)] == [[float(len(f"t{i}"))] for i in range(100)]


def test_the_bar_counts_samples(tmp_path: Path, client: RewardClient, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "p", "responses": ["a", "b", "c"]}] * 4)
    score_file(client, source, tmp_path / "out.jsonl")
    assert "12/12" in (error := capsys.readouterr().err)
    assert "sample/s" in error
