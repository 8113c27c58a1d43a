"""Files scored through a real server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from guerdon.client import RewardClient, Scores
from guerdon.client.files import score_file
from guerdon.config import ServerConfig
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest, SampleFailed, StartError, Unavailable, Unreachable
from guerdon.server.runtime import RunningServer
from server.echo_service import EchoService


class Service(EchoService):
    """The echo service; texts with "bad" fail, requests with "wrong" are refused, and it keeps all that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ScoreRequest] = []

    async def score(self, name: str, request: ScoreRequest) -> ScoreReply:
        self.seen.append(request)
        if any("wrong" in text for text in request.texts or ()):
            raise InvalidRequest("this is wrong")
        reply = await super().score(name, request)
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
    running[0].seen.clear()
    return running[0]


@pytest.fixture
def client(running: tuple[Service, RewardClient]) -> RewardClient:
    return running[1]


def write(path: Path, rows: list[Any]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


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
    assert request.groups is not None
    assert request.groups.tolist() == [0] * len(sent)
    rewards = [float(len(sample if isinstance(sample, str) else str(sample))) for sample in sent]
    assert read(target) == [{"id": 7, **row, "rewards": rewards}]
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
    assert [{k: v for k, v in row.items() if k not in ("rewards", "errors")} for row in out] == rows
    assert out[499]["rewards"] == [4.0 + 499 % 9, 5.0]
    assert (out[3]["rewards"], out[3]["errors"]) == ([None, 6.0], ["not finite", None])
    assert out[4]["rewards"] == []
    assert (out[5]["rewards"], out[5]["errors"]) == ([None], ["this is wrong"])
    assert (summary.num_rows, summary.num_samples, summary.num_failed) == (500, 997, 2)
    assert "2 failed, the first: not finite" in str(summary)


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
    assert len(service.seen) == 60
    assert (summary.num_resumed, summary.num_rows, summary.num_failed) == (40, 100, 1)
    assert score_file(client, source, target, progress=False).num_resumed == 100
    assert len(service.seen) == 60


def test_an_output_of_another_input_is_left_alone(tmp_path: Path, service: Service, client: RewardClient) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b"}]), tmp_path / "out.jsonl"
    for content, line in (
        ('{"text":"a","rewards":[1.0]}\n{"text":"x","rewards":[1.0]}\n', 2),
        ('{"text":"a"}\n', 1),
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
        ('{"prompt": "a", "responses": "b"}', "responses is not a list"),
        ('{"prompt": "a", "responses": ["b", 3]}', "a response is a int"),
        ('{"prompt": "a", "responses": ["b", [{"role": "user", "content": "c"}]]}', "both texts and messages"),
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


def test_paths_that_cannot_be(tmp_path: Path, client: RewardClient) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(StartError, match="cannot read"):
        score_file(client, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    with pytest.raises(StartError, match="cannot read"):
        score_file(client, tmp_path / "cut.jsonl.gz", tmp_path / "out.jsonl")
    for target in (source, tmp_path / "out.jsonl.gz"):
        with pytest.raises(StartError, match="cannot write to"):
            score_file(client, source, target)


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
