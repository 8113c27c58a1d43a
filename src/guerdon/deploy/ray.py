"""The service as a Ray Serve deployment: the same answers, from as many replicas as the load needs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

from starlette.types import ASGIApp, Receive, Scope, Send

from guerdon.assembly import build_service
from guerdon.core import ModelInfo
from guerdon.errors import ConfigError, StartError, Unavailable, Unsupported, install_command
from guerdon.server import runtime, status
from guerdon.server.front import http_app
from guerdon.server.model_repository import Repository
from guerdon.settings.access import KEYS_VARIABLE, has_keys, is_loopback
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import check_settings, from_mapping
from guerdon.settings.yaml_files import read_yaml

try:
    from ray import serve
    from ray.serve.context import _get_global_client  # no public function tells where the proxies listen
except ImportError as e:
    raise StartError("ray is not installed", install_command("ray")) from e

log = logging.getLogger(__name__)

NAME = "guerdon"
"""The deployment's name, by which a Serve config's `deployments:` overrides its options."""

MAX_ONGOING_REQUESTS = 256
"""Further requests wait in Ray's proxy, where a new replica can take them; batches are full long before."""

TARGET_ONGOING_REQUESTS = 8
"""Requests in progress per replica, unless the autoscaling config sets it."""

_OPTIONS = {
    "name": NAME,
    # Ray notices at its next health check that a replica died or is not ready.
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 30.0,
    # As long as a plain server's; every half second Ray checks whether all requests are answered.
    "graceful_shutdown_timeout_s": 30.0,
    "graceful_shutdown_wait_loop_s": 0.5,
    "logging_config": {"enable_access_log": False},
}


def deployment(config: ServerConfig | dict[str, Any] | str | Path, **options: Any) -> Any:
    """Returns the application for `serve.run`: all HTTP protocols of `config`'s server; one process per replica.

    `config` is a ServerConfig, a mapping of its settings, or a YAML file of them, which the replicas do not read. Its
    addresses are ignored, because Ray's proxies listen; relative paths start in this process's working directory.
    `options` are those of `serve.deployment`, such as `num_replicas`, `autoscaling_config` and
    `ray_actor_options={"num_gpus": 1}`, and override this module's defaults.

    Raises ConfigError if the settings are invalid, or do not allow replicas.
    """
    settings = _with_absolute_paths(_settings(config))
    _check(settings)
    options = {**_OPTIONS, "max_ongoing_requests": min(settings.max_requests, MAX_ONGOING_REQUESTS), **options}
    scaling = options.get("autoscaling_config")
    if isinstance(scaling, dict):
        options["autoscaling_config"] = {"target_ongoing_requests": TARGET_ONGOING_REQUESTS, **scaling}
    return serve.deployment(**options)(Replica).bind(settings)


def build(args: dict[str, Any]) -> Any:
    """Calls `deployment` for `serve run guerdon.deploy.ray:build config=server.yaml`, or for a Serve config's `args:`.

    `args` have `config`, a YAML file's path, or the server's settings themselves. A Serve config has the deployment's
    options under `deployments:`, by the name `guerdon`.
    """
    if "config" not in args:
        return deployment(args)
    others = sorted(set(args) - {"config"})
    if others:
        raise ConfigError(f"both config and {others[0]} are given", "write all settings in that file, or all here")
    return deployment(args["config"])


class _DeferredApp:
    """The ASGI application that Ray gets before there is a service; a replica sets the service's as `inner`."""

    inner: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the replica starts and stops by itself
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
        else:
            await self.inner(scope, receive, send)


class _IngressBase:
    """The empty class that `serve.ingress` extends."""


class Replica(serve.ingress(_DeferredApp())(_IngressBase)):  # type: ignore[misc]
    """One process with the models and their service; Ray creates it, and calls its methods on the service's loop."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Loads the models; raises the errors of `build_service`, and ConfigError if keys are needed and missing."""
        await super().__init__()
        logging.getLogger("guerdon").setLevel(config.log_level.upper())
        config = dataclasses.replace(config, host=await asyncio.to_thread(_proxies_host))
        # Here, since only the replica's environment may have keys.
        if not (is_loopback(config.host) or has_keys(config) or config.allow_anonymous):
            raise ConfigError(
                f"no keys are set, and other machines reach Ray's proxies, which listen on {config.host}",
                f"set `api_keys_file`, or {KEYS_VARIABLE} for the replicas by `runtime_env`; set `allow_anonymous: "
                "true` if everybody who reaches the proxies may use them",
            )
        self._service = await asyncio.to_thread(build_service, config)
        self._service.repository = _ReadOnlyRepository()
        runtime.settle()
        runtime.log_without_texts()
        self._service.start()
        self.app.inner = http_app.app(self._service, config)
        names = [info.name for info in self._service.catalog.models() if isinstance(info, ModelInfo)]
        log.info("replica in process %d serves %s", os.getpid(), ", ".join(names))

    def check_health(self) -> None:
        """Raises Unavailable if the service is not ready; Ray then replaces the replica."""
        if not status.is_ready(self._service):
            raise Unavailable("the service is not ready: its loop has ended; the log says why")

    async def __del__(self) -> None:
        """Stops the service, after Ray has seen that all accepted requests are answered."""
        if hasattr(self, "_service"):  # the constructor may have failed
            await asyncio.to_thread(self._service.stop)
        await super().__del__()


class _ReadOnlyRepository(Repository):
    """Refuses to load and unload, which would reach only one replica."""

    _requests_wait = False

    def __init__(self) -> None:
        pass

    async def load(self, name: str, source: str | None, client: str = "") -> str:
        """Raises Unsupported."""
        raise Unsupported("one replica of several cannot load a model; redeploy the application with other models")

    async def unload(self, name: str, client: str = "") -> None:
        """Raises Unsupported."""
        raise Unsupported("one replica of several cannot unload a model; redeploy the application without it")

    async def _for_each(self, *_: Any) -> NoReturn:
        raise Unsupported("one replica of several cannot sleep or wake; let Ray Serve scale the application")


def _settings(config: ServerConfig | dict[str, Any] | str | Path) -> ServerConfig:
    if isinstance(config, ServerConfig):
        return config
    settings: ServerConfig = from_mapping(ServerConfig, read_yaml(config) if isinstance(config, str | Path) else config)
    return settings


def _with_absolute_paths(config: ServerConfig) -> ServerConfig:
    """Returns the settings for replicas, whose working directory is that in which Ray was started."""

    def absolute(model: Any) -> Any:
        more = {"adapters": [absolute(x) for x in model.adapters]} if getattr(model, "adapters", None) else {}
        return dataclasses.replace(
            model, **more, model=os.path.abspath(model.model) if os.path.exists(model.model) else model.model
        )

    models = [absolute(model) for model in config.models]
    keys = config.api_keys_file and os.path.abspath(config.api_keys_file)
    return dataclasses.replace(config, models=models, api_keys_file=keys)


def _check(config: ServerConfig) -> None:
    check_settings(dataclasses.replace(config, host=ServerConfig.host))  # its own address has no effect here
    if config.critic is not None:
        raise ConfigError(
            "a critic cannot have replicas: they would diverge, and write to one journal",
            "serve it with `guerdon serve-critic`, and remove `critic:` here",
        )
    if not config.models or not all(model.model for model in config.models):
        raise ConfigError("no model to serve", "add `models:` with `- model:` lines")
    if config.tensor_parallel > 1 or config.data_parallel not in (None, 1) or config.fsdp:
        raise ConfigError(
            "tensor_parallel, data_parallel and fsdp need several processes per model, and a replica is one process",
            "remove them, or serve this model with `guerdon serve`",
        )
    if (config.tls_cert, config.tls_key, config.tls_client_ca) != (None, None, None):
        raise ConfigError(
            "tls_cert, tls_key and tls_client_ca have no effect: Ray's proxies listen, without TLS",
            "remove them, and put a TLS proxy in front of Ray's",
        )
    for name in ("model_repository", "weight_transfer"):
        if getattr(config, name) is None:
            continue
        raise ConfigError(
            f"{name} is set, but one replica of several cannot load a model",
            "remove it, and redeploy the application for other weights",
        )
    for reward in config.rewards:
        for part in reward.components:
            if part.normalize == "running":
                raise ConfigError(
                    f"{reward.name} normalizes {part.model} by running statistics, which differ between replicas",
                    "set `normalize: given` with the mean and std from a plain server's /metrics",
                )


def _proxies_host() -> str:
    """Returns the address on which Ray's proxies listen."""
    host: str = _get_global_client().http_config.host
    return host
