"""Settings and keys of replicas; Ray itself is a stand-in here (test_ray.py has the real one)."""

import asyncio
import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

import guerdon.deploy
from guerdon.errors import ConfigError
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import from_mapping
from server.keys import ADMIN, SCORE, bearer, keyed

MODELS = {"models": [{"model": "served:flaky", "name": "reward_model"}]}


def ingress(app: Any) -> Callable[[type], type]:
    """As Ray's: the deployment's class has the application, and is made and ended within a loop."""

    class Wrapped:
        async def __init__(self) -> None:  # type: ignore[misc]
            self.app = app

        async def __del__(self) -> None:
            pass

    return lambda _: Wrapped


@pytest.fixture
def proxies() -> SimpleNamespace:
    """Where Ray's proxies listen."""
    return SimpleNamespace(host="0.0.0.0")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, proxies: SimpleNamespace) -> Any:
    """`guerdon.deploy.ray` over the stand-in, without any keys in the environment."""
    monkeypatch.delenv("GUERDON_API_KEYS", raising=False)
    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    ray.serve, serve.ingress = serve, ingress  # type: ignore[attr-defined]
    context = ModuleType("ray.serve.context")
    context._get_global_client = lambda: SimpleNamespace(http_config=proxies)  # type: ignore[attr-defined]
    for name, stand_in in (("ray", ray), ("ray.serve", serve), ("ray.serve.context", context)):
        monkeypatch.setitem(sys.modules, name, stand_in)
    path = Path(guerdon.deploy.__path__[0]) / "ray.py"
    spec = importlib.util.spec_from_file_location("ray_over_a_stand_in", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.end, made.Replica.__del__ = made.Replica.__del__, lambda _: None  # Ray awaits it; Python would not
    return made


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"critic": {"model": "x"}}, "a critic cannot have replicas"),
        ({"models": [{"model": "x"}], "tensor_parallel": 2}, "several processes"),
        ({"models": [{"model": "x"}], "fsdp": True}, "fsdp is on"),
        ({}, "no model"),
        ({"models": [{"model": "x"}], "prot": 1}, "unknown setting prot"),
        ({"models": [{"model": "x"}], "max_requests": 0}, "max_requests is 0"),
        ({"models": [{"model": "x"}], "tls_cert": "c", "tls_key": "k"}, "Ray's proxies listen, without TLS"),
        (
            {"models": [{"model": "x"}], "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"},
            "Ray's proxies listen, without TLS",
        ),
        ({"models": [{"model": "x"}], "model_repository": "."}, "one replica of several cannot load"),
        ({"config": "x.yaml", "port": 1}, "both config and port"),
        (
            {
                "models": [{"model": "x", "name": "a"}],
                "rewards": [{"components": [{"model": "a", "normalize": "running"}]}],
            },
            "differ between replicas",
        ),
    ],
)
def test_settings_that_do_not_allow_replicas_are_refused(module: Any, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        module.build(given)


def asked(module: Any, config: ServerConfig, requests: list[httpx.Request]) -> list[httpx.Response]:
    """Returns the answers of a replica with these settings."""

    async def ask() -> list[httpx.Response]:
        replica = module.Replica.__new__(module.Replica)
        await replica.__init__(config)
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(replica.app)) as client:
                return [await client.send(request) for request in requests]
        finally:
            await module.end(replica)
            gc.unfreeze()

    return asyncio.run(ask())


def post(path: str, **headers: str) -> httpx.Request:
    return httpx.Request("POST", f"http://rewards.example.com{path}", json={"query": ["abc"]}, headers=headers)


def test_a_replica_needs_keys_or_a_word(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no keys are set"):
        asked(module, from_mapping(ServerConfig, MODELS), [])
    with_file = keyed(tmp_path, models=from_mapping(ServerConfig, MODELS).models)
    without, having = asked(module, with_file, [post("/get_reward"), post("/get_reward", **bearer(SCORE))])
    assert (without.status_code, having.status_code) == (401, 200)
    anonymous = from_mapping(ServerConfig, MODELS | {"allow_anonymous": True})
    page = {"Origin": "http://rewards.example.com"}  # which is no loopback's name, and need be none
    (reply,) = asked(module, anonymous, [post("/get_reward", **page)])
    assert (reply.status_code, reply.json()["rewards"]) == (200, [3.0])
    monkeypatch.setenv("GUERDON_API_KEYS", f"score me {SCORE}")  # by `runtime_env`
    (reply,) = asked(module, from_mapping(ServerConfig, MODELS), [post("/get_reward")])
    assert reply.status_code == 401


@pytest.mark.slow
def test_proxies_on_loopback_need_no_keys_as_a_plain_server_there(module: Any, proxies: SimpleNamespace) -> None:
    config = from_mapping(ServerConfig, MODELS)
    for proxies.host in ("127.0.0.1", "::1"):
        named = [post("/get_reward", Host=name) for name in ("localhost:8000", "rewards.example.com")]
        assert [reply.status_code for reply in asked(module, config, named)] == [200, 403]


@pytest.mark.slow
def test_a_file_for_another_address_does_for_rays(module: Any, proxies: SimpleNamespace) -> None:
    proxies.host = "127.0.0.1"
    settings = module._settings(MODELS | {"host": "0.0.0.0", "port": 1})
    module._check(settings)
    (reply,) = asked(module, settings, [post("/get_reward", Host="localhost")])
    assert reply.status_code == 200


def test_relative_paths_start_where_the_application_is_built(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    given = {
        "models": [{"model": "./rm", "name": "a"}, {"model": "someone/model", "name": "b"}],
        "api_keys_file": "keys",
    }
    config = module._with_absolute_paths(module._settings(given))
    assert [model.model for model in config.models] == [str(tmp_path / "rm"), "someone/model"]
    assert config.api_keys_file == os.path.join(tmp_path, "keys")


@pytest.mark.slow
def test_no_replica_loads_or_unloads_for_itself(module: Any, tmp_path: Path) -> None:
    config = keyed(tmp_path, models=from_mapping(ServerConfig, MODELS).models)
    path = "/v2/repository/models/reward_model"
    for what in ("load", "unload"):
        request = httpx.Request("POST", f"http://ray{path}/{what}", headers=bearer(ADMIN))
        (reply,) = asked(module, config, [request])
        assert reply.status_code == 501 and f"one replica of several cannot {what}" in reply.json()["error"]
