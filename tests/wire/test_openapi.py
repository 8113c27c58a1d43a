import re
from collections.abc import Iterator
from importlib import metadata

import httpx
import pytest

from guerdon.core import ModelInfo
from guerdon.critic_core import Operation, OperationInfo
from guerdon.server.front import http_app
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from guerdon.wire import kserve, openapi, signature
from guerdon.wire.forms import FORMS, triton_repository
from served import Serve
from server.echo_service import EchoService
from server.form_examples import EXAMPLES

MODEL, TRAIN = ModelInfo("rm", "echo"), OperationInfo("critic_train", Operation.TRAIN, "critic")
DOCUMENT = openapi.document([MODEL, TRAIN])


@pytest.fixture(scope="module")
def service() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def running(service: EchoService, serve: Serve) -> RunningServer:
    return serve(build=lambda _: service)


def test_every_route_is_in_the_document_and_no_other(service):
    served = {}
    for route in http_app.app(service, ServerConfig()).routes:  # type: ignore[attr-defined]
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        served[path] = {method.lower() for method in route.methods}
    assert served == {path: set(operations) for path, operations in DOCUMENT["paths"].items()}


def references(value: object) -> Iterator[str]:
    """Whatever the document refers to."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from [inner] if key == "$ref" else references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def schemas(value: object) -> Iterator[dict]:
    """Every schema in the document, as far as its keys tell it from a map of schemas."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str | list) or isinstance(value.get("enum"), list):
            yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from schemas(inner)


def test_generators_of_clients_can_read_every_schema():
    """openapi-python-client stops at `items: false`, at bare arrays, and at names equal but for their case."""
    found = list(schemas(DOCUMENT))
    assert len(found) > 300
    for schema in found:
        kinds = schema.get("type", [])
        if "array" in ([kinds] if isinstance(kinds, str) else kinds):
            assert isinstance(schema.get("items"), dict) or schema.get("prefixItems"), schema
        assert isinstance(schema.get("items", {}), dict), schema
        names = [str(value).lower() for value in schema.get("enum", [])]
        assert len({*names}) == len(names), schema
        assert len({*map(type, schema.get("enum", []))} - {type(None)}) <= 1, schema


def test_what_is_referred_to_is_there():
    found = {*references(DOCUMENT)}
    assert found
    for reference in found:
        _, where, kind, name = reference.split("/")
        assert name in DOCUMENT[where][kind]


def test_models_are_named_where_they_may_be_asked():
    def names(path: str) -> list[str]:
        (operation, *_) = DOCUMENT["paths"][path].values()
        parameters = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"]}
        return (parameters.get("name") or parameters["model"])["enum"]

    assert names("/v2/models/{name}/infer") == ["rm", "critic_train"]
    assert names("/v1/models/{name}") == names("/score") == names("/v2/repository/models/{name}/load") == ["rm"]


def test_only_what_is_said_to_be_open_needs_no_key():
    is_open = [
        path for path, found in DOCUMENT["paths"].items() if any(o.get("security") == [] for o in found.values())
    ]
    assert sorted(is_open) == ["/health", "/health/", "/v2/health/live", "/v2/health/ready"]


def test_a_server_publishes_it(running, service):
    answer = httpx.get(running.http_url + "/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert told == openapi.document(service.catalog.models(), version=told["info"]["version"])
    assert told["info"]["version"] == metadata.version("guerdon")


def fits(value: object, schema: dict) -> bool:
    """Whether the value is of the schema, as far as the document uses JSON Schema for answers."""
    if "$ref" in schema:
        return fits(value, openapi.components()[1][schema["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "null": type(None)}
    kinds["boolean"] = bool
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(isinstance(value, kinds[kind]) for kind in wanted):
        return False
    if isinstance(value, list):
        return all(fits(one, schema.get("items", {})) for one in value)
    if not isinstance(value, dict):
        return True
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    return set(schema.get("required", ())) <= set(value) and all(
        fits(one, properties.get(name, more)) for name, one in value.items()
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_answers_and_errors_of_the_forms_fit_it(running, example):
    form = FORMS[example.path]
    body = example.body("a text")
    assert fits(body, openapi.schema_of(*form.bodies))
    with httpx.Client(base_url=running.http_url) as client:
        assert fits(client.post(example.path, json=body).json(), openapi.schema_of(*form.replies))
        refused = client.post(example.path, json=[])
    told = DOCUMENT["components"]["responses"][f"{form.error.__name__}{refused.status_code}"]
    (content,) = told["content"].values()
    content = content["schema"].get("anyOf", [content["schema"]])[0]
    assert fits(refused.json(), content)


def test_answers_of_the_protocol_fit_it(running, service):
    with httpx.Client(base_url=running.http_url) as client:
        for path, operations in openapi.document(service.catalog.models())["paths"].items():
            is_page = path in ("/", "/docs") or path.startswith("/dashboard/")
            is_json = path not in ("/metrics", "/openapi.json") and not path.endswith("/head")
            if "get" not in operations or is_page or not is_json:
                continue
            answer = client.get(path.format(name="many", version=signature.MODEL_VERSION))
            assert answer.status_code == 200, path
            content = operations["get"]["responses"]["200"].get("content")
            assert bool(content) == bool(answer.content), path
            assert not content or fits(answer.json(), content["application/json"]["schema"]), path
        entry = {"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
        asked = {"inputs": [entry], "outputs": [{"name": "rewards"}]}
        assert fits(asked, openapi.schema_of(kserve.RequestBody))
        assert fits(client.post("/v2/models/many/infer", json=asked).json(), openapi.schema_of(kserve.ReplyBody))
        assert fits(client.post("/v2/repository/index").json(), openapi.schema_of(list[triton_repository.IndexEntry]))
