"""Names that clients give are looked up among what is served, and are never a path."""

import http.client
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from guerdon import CriticClient, RetryPolicy
from guerdon.errors import InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from served import Serve
from server.arithmetic_critic import ArithmeticService, request
from server.echo_service import EchoService
from server.keys import ADMIN, bearer, keyed

SECRET = "outside-secret"
NAMES = [
    f"../{SECRET}", f"..%2f{SECRET}", f"%2e%2e%2f{SECRET}", f"..%5c{SECRET}", f"/etc/{SECRET}", f"{SECRET}%00.json",
    f"./././{SECRET}", f"file:///{SECRET}", f"{SECRET}/versions/../../..", f"{SECRET}:run", "x" * 4000,
]  # fmt: skip
_opened: list[str] = []
_watching = False


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in ("open", "os.listdir", "os.scandir", "import") and arguments:
        _opened.append(str(arguments[0]))


sys.addaudithook(_note)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """What this process opens, lists and imports during the test."""
    global _watching
    _opened.clear()
    _watching = True
    yield _opened
    _watching = False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    config = keyed(tmp_path_factory.mktemp("keys"))
    return serve(config=config, build=EchoService)


@pytest.mark.parametrize("name", NAMES)
def test_a_models_name_leads_to_no_file(name: str, server: RunningServer, opened: list[str]) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.http_url).netloc, timeout=120)
    admins = bearer(ADMIN)  # whom nothing but the name holds up
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/config", f"/v2/models/{name}/ready", f"/v1/models/{name}"):
        connection.request("GET", path, headers=admins)
        answer = connection.getresponse()
        assert answer.status in (400, 404) and b"Traceback" not in answer.read()
    for path, body in (
        (f"/v2/models/{name}/infer", {}),
        ("/get_reward", {"model": name, "query": ["x"]}),
        (f"/v2/repository/models/{name}/load", {}),
        (f"/v2/repository/models/{name}/unload", {}),
    ):
        connection.request("POST", path, json.dumps(body), headers=admins)
        answer = connection.getresponse()
        assert answer.status in (400, 404) and b"Traceback" not in answer.read()
    connection.close()
    assert server.grpc_url is not None
    with grpc.insecure_channel(urlsplit(server.grpc_url).netloc) as channel:
        stub, metadata = GRPCInferenceServiceStub(channel), (("authorization", admins["Authorization"]),)
        for method, message in (
            (stub.ModelMetadata, pb.ModelMetadataRequest(name=name)),
            (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name=name)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                method(message, timeout=120, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert not [path for path in opened if SECRET in path]


@pytest.mark.parametrize("name", ["../other", "/etc", "..", ".", "step-1/../../other", "a\0b", ""])
def test_a_checkpoints_name_leads_out_of_no_folder(name: str, tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weight.json").write_text('{"weight": 7, "step": 7, "lineage": 7}')
    service = ArithmeticService(tmp_path / "critic")
    policy = RetryPolicy(timeout_s=30, tries=1)
    with (
        RunningServer(service, ServerConfig(port=0, grpc_port=None)) as server,
        CriticClient(server.http_url, policy=policy) as critic,
    ):
        asked = request("a", 3)
        critic.train(asked.tokens, asked.returns, asked.prev_values, asked.mask).result(120)
        critic.save()
        opened.clear()
        if name:
            with pytest.raises(InvalidRequest):
                critic.load(name)
        else:
            critic.load(name)  # the newest
        assert critic.state().step == 1 and service.trainer.weight != 7
    assert not [path for path in opened if str(tmp_path / "other") in path]
