"""Which checkpoint a load names, as tritonclient and people write it."""

import json
from typing import Any

import pytest
import tritonclient.http as triton
from tritonclient.grpc import service_pb2 as pb

from guerdon.errors import GuerdonError, InvalidRequest, Unsupported
from guerdon.wire.forms import triton_repository as repository
from guerdon.wire.kserve_grpc import read_parameters


def config(value: Any) -> str:
    return json.dumps({"name": "rm", "parameters": {"model": {"string_value": value}}})


def body(**parameters: Any) -> bytes:
    return json.dumps({"parameters": parameters}).encode()


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (b"", None),
        (b"{}", None),
        (b'{"parameters": null}', None),
        (body(), None),
        (body(model="step-100"), "step-100"),
        (body(model=None), None),
        (body(config=config("step-100")), "step-100"),
        (body(config=config("step-100"), model="step-100"), "step-100"),
        (body(config='{"parameters": {}}'), None),
        (body(config='{"backend": "python"}'), None),
    ],
)
def test_what_is_named(sent: bytes, named: str | None) -> None:
    assert repository.source(sent) == named


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"[", "not valid JSON"),
        (b"[]", "a list"),
        (body(model=3), "model is 3"),
        (body(model=""), "model is empty"),
        (body(modle="x"), "unknown key 'modle'"),
        (body(unload_dependents=False), "unknown key 'unload_dependents'"),
        (b'{"model": "step-100"}', "unknown key 'model'; it takes parameters"),
        (b'{"parameter": {"model": "step-100"}}', "unknown key 'parameter'"),
        (body(config="{"), "config is not valid JSON"),
        (body(config={}), "config is an object"),
        (body(config="[]"), "a list"),
        (body(config='{"parameters": {"model": "x"}}'), "a string"),
        (body(config=config(7)), "parameters.model.string_value is 7; send a folder's name"),
        (body(config=config("a"), model="b"), "two checkpoints are named, 'b' and 'a'"),
        (b'{"parameters": []}', "a list"),
    ],
)
def test_what_cannot_be_read_is_said(sent: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        repository.source(sent)


@pytest.mark.parametrize("sent", [b"", b"{}", body(unload_dependents=False), body(unload_dependents=True)])
def test_what_an_unload_says(sent: bytes) -> None:
    repository.check_unload(sent)


@pytest.mark.parametrize("sent", [b"no JSON", b"[]", b'{"model": "x"}', body(model="x"), b'{"parameters": 3}'])
def test_an_unload_names_nothing_else(sent: bytes) -> None:
    with pytest.raises(InvalidRequest):
        repository.check_unload(sent)


def test_files_are_not_taken() -> None:
    with pytest.raises(Unsupported, match="not accepted over the network"):
        repository.source(body(config="{}", **{"file:1/model.pt": "AAAA"}))


def test_the_protobuf_says_the_same() -> None:
    asked = pb.RepositoryModelLoadRequest(model_name="rm")
    assert repository.source_of(read_parameters(asked.parameters)) is None
    asked.parameters["config"].string_param = config("step-100")
    assert repository.source_of(read_parameters(asked.parameters)) == "step-100"
    asked.parameters["config"].int64_param = 3
    with pytest.raises(GuerdonError, match="config is 3"):
        repository.source_of(read_parameters(asked.parameters))
    del asked.parameters["config"]
    asked.parameters["file:x"].bytes_param = b"x"
    with pytest.raises(Unsupported):
        repository.source_of(read_parameters(asked.parameters))


def test_what_tritonclient_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Answer:
        status_code = 200

    client = triton.InferenceServerClient("127.0.0.1:1")
    monkeypatch.setattr(client, "_post", lambda request_body, **_: (sent.append(request_body.encode()), Answer())[1])
    client.load_model("rm")
    client.load_model("rm", config=config("step-100"))
    client.unload_model("rm")
    assert [repository.source(each) for each in sent[:2]] == [None, "step-100"]
    repository.check_unload(sent[2])
