"""A kind that one file adds is served as the others are: over HTTP and gRPC, in docs, page, console and commands."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

import served
from guerdon import RewardClient
from guerdon.assembly import build_scorer
from guerdon.cli import console
from guerdon.cli.subcommands import make_parser
from guerdon.kinds import all_kinds
from guerdon.server.runtime import RunningServer
from guerdon.wire import schema
from kinds.vowels import COUNTS, Vowels, VowelsConfig, add, count_vowels

TEXTS = ["Goethe", "rhythm", "aeiou AEIOU"]


@pytest.fixture(scope="module", autouse=True)
def kind() -> Iterator[None]:
    """The kind, added while this module's tests run: the commands and docs of others must not have it."""
    add()
    yield
    all_kinds.KINDS[:] = [kind for kind in all_kinds.KINDS if not isinstance(kind, Vowels)]
    del all_kinds._BY_NAME["vowels"], schema.MODEL_OUTPUTS[COUNTS.name]
    schema.OUTPUTS.remove(COUNTS)
    schema.outputs_of.cache_clear()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with served.running(VowelsConfig(), grpc_port=0) as server:
        yield server


def test_it_is_served_over_http_and_grpc_and_has_its_clients_call(server: RunningServer) -> None:
    for url in (server.http_url, server.grpc_url or ""):
        with RewardClient(url, model="vowels") as client:
            assert client.ask(count_vowels(TEXTS)).result() == [3, 0, 10]
            assert client.score(texts=TEXTS).rewards.tolist() == pytest.approx([3 / 6, 0, 10 / 11])


def test_it_stands_in_metadata_docs_and_page(server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url) as http:
        outputs = http.get("/v2/models/vowels").json()["outputs"]
        assert {"name": "vowels", "datatype": "INT64", "shape": [-1, 1]} in outputs
        assert "vowels" in http.get("/openapi.json").text and http.get("/docs").status_code == 200
        (model,) = http.get("/dashboard/snapshot").json()["models"]
        assert (model["name"], model["kind"], model["estimates_tokens"]) == ("vowels", "vowels", True)
        assert 'guerdon_model_info{device="cpu",dtype="float32",kind="vowels"' in http.get("/metrics").text


def test_it_has_a_command_and_a_line_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    assert "serve-vowels" in capsys.readouterr().out
    args = make_parser().parse_args(["serve-vowels", "xyz", "--name", "last"])
    (config,) = Vowels.command.read(args).models  # type: ignore[union-attr]
    assert config == VowelsConfig(model="xyz", name="last")
    info = build_scorer(config).info
    assert isinstance(all_kinds.of(info), Vowels) and console.describe_model(info) == "last: counts xyz"
