"""The service as a Ray Serve deployment: the same answers, from as many replicas as the load asks for."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from guerdon.assembly import build_service
from guerdon.core import ModelInfo
from guerdon.errors import ConfigError, StartError, Unavailable, Unsupported, install_command
from guerdon.server import runtime, status
from guerdon.server.front import http_app
from guerdon.server.model_repository import Repository
from guerdon.settings.access import KEYS_VARIABLE, has_keys
from guerdon.settings.config import ParallelConfig, ServerConfig, check_settings
from guerdon.settings.fields import from_mapping
from guerdon.settings.sources import read_yaml

try:
    from ray import serve
except ImportError as e:
    raise StartError("ray is not installed", install_command("ray")) from e

log = logging.getLogger(__name__)

NAME = "guerdon"
"""The deployment's name, by which a Serve config's `deployments:` overrides its options."""

MAX_ONGOING_REQUESTS = 256
"""More wait in Ray's proxy, from which a replica that is added takes them; a server's batches are full long before."""

TARGET_ONGOING_REQUESTS = 8
"""How many requests a replica should have at a time, where the autoscaling config does not say."""

_OPTIONS = {
    "name": NAME,
    # Ray sees that a replica died or is not ready when it next asks.
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 30.0,
    # As long as a plain server has; every half second Ray looks whether all is answered.
    "graceful_shutdown_timeout_s": 30.0,
    "graceful_shutdown_wait_loop_s": 0.5,
    "logging_config": {"enable_access_log": False},
}


def deployment(config: ServerConfig | dict[str, Any] | str | Path, **options: Any) -> Any:
    """The application for `serve.run`: every HTTP form of `config`'s server, from replicas of one process each.

    `config` is a ServerConfig, a mapping of its settings, or a YAML file of them, read here and not by the replicas;
    of its addresses nothing is used, as Ray's proxies listen. `options` are those of `serve.deployment`, such as
    `num_replicas`, `autoscaling_config` and `ray_actor_options={"num_gpus": 1}`, over the defaults of this module.

    Raises ConfigError where the settings are wrong, or of what must not or cannot have replicas.
    """
    settings = _settings(config)
    _check(settings)
    options = {**_OPTIONS, "max_ongoing_requests": min(settings.max_requests, MAX_ONGOING_REQUESTS), **options}
    scaling = options.get("autoscaling_config")
    if isinstance(scaling, dict):
        options["autoscaling_config"] = {"target_ongoing_requests": TARGET_ONGOING_REQUESTS, **scaling}
    return serve.deployment(**options)(Replica).bind(settings)


def build(args: dict[str, Any]) -> Any:
    """`deployment` for `serve run guerdon.deploy.ray:build config=server.yaml`, and for a Serve config's `args:`.

    `args` are `config`, a YAML file's path, or the server's settings themselves. The deployment's options stand in
    the Serve config's `deployments:`, under the name `guerdon`.
    """
    if "config" not in args:
        return deployment(args)
    others = sorted(set(args) - {"config"})
    if others:
        raise ConfigError(f"config is given, and {others[0]}, too", "write all settings in that file, or all here")
    return deployment(args["config"])


class _Door:
    """The ASGI application that Ray is given before there is a service; a replica puts its own behind it."""

    inner: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the replica starts and stops by itself
            await _lifespan(receive, send)
        else:
            await self.inner(scope, receive, send)


class _Empty:
    """What `serve.ingress` makes a deployment of."""


class Replica(serve.ingress(_Door())(_Empty)):  # type: ignore[misc]
    """One process with the models and their service; Ray makes it, and calls its methods on the service's loop."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # as Ray has it
        """Loads the models; raises what `build_service` raises, and ConfigError where nobody would need a key."""
        await super().__init__()
        logging.getLogger("guerdon").setLevel(config.log_level.upper())
        _check_keys(config)
        config = dataclasses.replace(config, host="")  # any: where Ray's proxies listen is not known here
        self._service = await asyncio.to_thread(build_service, config)
        self._service.repository = _Fixed()
        runtime.settle()
        runtime.log_without_texts()
        self._service.start()
        self.app.inner = http_app.app(self._service, config)
        names = [info.name for info in self._service.catalog.models() if isinstance(info, ModelInfo)]
        log.info("replica in process %d serves %s", os.getpid(), ", ".join(names))

    def check_health(self) -> None:
        """Raises Unavailable where the service is not ready: Ray then puts another replica in its place."""
        if not status.is_ready(self._service):
            raise Unavailable("the service is not ready: its loop has ended; the log says why")

    async def __del__(self) -> None:
        """Ends the service, once Ray has seen that all it had accepted is answered."""
        if hasattr(self, "_service"):  # the constructor may have failed
            await asyncio.to_thread(self._service.stop)
        await super().__del__()


class _Fixed(Repository):
    """In the repository's place: a request reaches one replica, and the others would go on with other weights."""

    def __init__(self) -> None:
        pass

    async def load(self, name: str, source: str | None, client: str = "") -> str:
        """Raises Unsupported."""
        raise Unsupported("one replica of several cannot load a model; deploy the application again, with other models")

    async def unload(self, name: str, client: str = "") -> None:
        """Raises Unsupported."""
        raise Unsupported("one replica of several cannot unload a model; deploy the application again, without it")


def _settings(config: ServerConfig | dict[str, Any] | str | Path) -> ServerConfig:
    if isinstance(config, ServerConfig):
        return config
    settings: ServerConfig = from_mapping(ServerConfig, read_yaml(config) if isinstance(config, str | Path) else config)
    return settings


def _check(config: ServerConfig) -> None:
    check_settings(config)
    if config.critic is not None:
        raise ConfigError(
            "a critic cannot have replicas: each would learn for itself, and all would write one journal",
            "serve it with `guerdon serve-critic`, and leave `critic:` out here",
        )
    if not config.models or not all(model.model for model in config.models):
        raise ConfigError("no model to serve", "add `models:` with `- model:` lines")
    if (config.tensor_parallel, config.fsdp) != (ParallelConfig.tensor_parallel, ParallelConfig.fsdp):
        raise ConfigError(
            "tensor_parallel and fsdp need several processes for one model, and a replica is one process",
            "leave them out, or serve this model with `torchrun -m guerdon serve`",
        )
    if (config.tls_cert, config.tls_key, config.tls_client_ca) != (None, None, None):
        raise ConfigError(
            "tls_cert, tls_key and tls_client_ca are for a server's sockets; here Ray's proxies listen, without TLS",
            "leave them out, and put a proxy that speaks TLS before Ray's",
        )
    if config.model_repository is not None:
        raise ConfigError(
            "model_repository is given, and one replica of several cannot load a model",
            "leave it out; other weights come by deploying the application again",
        )
    for reward in config.rewards:
        for part in reward.components:
            if part.normalize == "running":
                raise ConfigError(
                    f"{reward.name} normalizes {part.model} by what a server has seen, which differs between replicas",
                    "write `normalize: given` with the mean and std that /metrics of a plain server tells",
                )


def _check_keys(config: ServerConfig) -> None:
    """To be asked in the replica: its environment may have keys, and the one where the application is built none."""
    if not (has_keys(config) or config.allow_anonymous):
        raise ConfigError(
            "nobody would need a key, and Ray's proxies may listen where other machines reach them",
            f"give `api_keys_file`, or {KEYS_VARIABLE} to the replicas by `runtime_env`; or, where whoever reaches the "
            "proxies may use them, `allow_anonymous: true`",
        )


async def _lifespan(receive: Receive, send: Send) -> None:
    for word in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{word}.complete"})
