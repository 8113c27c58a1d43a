"""Builds scorers, trainers, worker, group and service, and runs them: for the command and the NeMo-Aligner classes."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from guerdon.core import Command, Executor
from guerdon.distributed.commands import Worker
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import EXIT_STATUS, Pulse
from guerdon.distributed.ranks import ALONE, Ranks, is_agreed, start
from guerdon.distributed.stopping import asking
from guerdon.engine.host import divide_cores, end_pool
from guerdon.errors import ConfigError, Exit, GuerdonError, RanksLost, ServerFault, describe
from guerdon.kinds import all_kinds
from guerdon.kinds.critic import infer_config
from guerdon.server import runtime
from guerdon.server.auth import Access
from guerdon.server.batching.jobs import Limits
from guerdon.server.batching.loops import by_device
from guerdon.server.catalog import file_time_ns
from guerdon.server.critic.controller import Critic
from guerdon.server.service import Service
from guerdon.settings.config import (
    CriticConfig,
    ServedModelConfig,
    ServerConfig,
)
from guerdon.settings.fields import check_settings

log = logging.getLogger(__name__)

_MOST_GRACE_S = 20.0
"""Limit of `shutdown_timeout_s` with several ranks: torchrun kills them 30 s after the signal."""
_AMID = "accepted requests are not done within %g s of the signal: this server ends without them"
_LAST_WORDS_S = 5.0
"""Time for a server that has lost a rank to answer its clients."""


def build_scorer(config: ServedModelConfig, ranks: Ranks = ALONE) -> Any:
    """Builds the scorer of one configured model, as its kind says."""
    return all_kinds.of_settings(config).load(config, ranks)


def build_trainer(config: CriticConfig, ranks: Ranks = ALONE) -> Any:
    """Builds the critic that learns, together with a reward model if the config names one."""
    return all_kinds.of_settings(config).load(config, ranks)


@dataclass(frozen=True)
class Parts:
    """How to build a server's parts; `limits` override those of the settings, by model name."""

    scorer: Callable[[ServedModelConfig, Ranks], Any] = build_scorer
    trainer: Callable[[CriticConfig, Ranks], Any] = build_trainer
    critic: Callable[[CriticConfig, Any], Critic] = Critic
    limits: dict[str, Limits] | None = None


PLAIN = Parts()


@dataclass(frozen=True)
class _Models:
    """The models that one rank has loaded."""

    served: list[tuple[ServedModelConfig, Any]]
    learner: Any = None
    since_ns: int | None = None

    def worker(self, config: ServerConfig, parts: Parts, ranks: Ranks) -> Worker:
        scorers = {model.name: scorer for model, scorer in self.served}
        settings = {model.name: model for model in config.models}

        def load(name: str, folder: str) -> Any:
            """Loads a replacement for a model; raises StartError if it cannot be loaded or fails the self-check."""
            with ranks.raise_on_all_ranks():
                scorer = parts.scorer(dataclasses.replace(settings[name], model=folder), ranks)
            scorer.check_scores()
            return scorer

        return Worker(scorers, {config.critic.name: self.learner} if config.critic else {}, ranks, load)


def build_service(config: ServerConfig, parts: Parts = PLAIN) -> Service:
    """Loads all configured models into this process and builds their service; raises StartError if one fails.

    A critic with a folder for checkpoints is restored to where its last server ended.
    """
    models = _load(config, parts, ALONE)
    return _service(config, parts, models, models.worker(config, parts, ALONE), ALONE)


def run(
    config: ServerConfig,
    parts: Parts = PLAIN,
    *,
    device: str | None = None,
    on_loaded: Callable[[Service], None] | None = None,
    on_started: runtime.OnStarted | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; then finishes accepted requests and returns.

    If torchrun has started several processes, rank 0 serves and calls `on_loaded` and `on_started`, and the others
    follow it until it ends; `device` is that of `ranks.start`. If a rank is lost, all exit with EXIT_STATUS; if one
    cannot start, all raise its error. Afterwards they ignore both signals.
    """
    check_settings(config)
    ranks = start(config, device)
    if ranks.size == 1:
        runtime.check_addresses(config)  # before models are loaded, which may take minutes
        _check_repository(config)
        service = build_service(config, parts)
        if on_loaded is not None:
            on_loaded(service)
        runtime.run(service, config, on_started=on_started)
        if service.is_computing:
            log.error(_AMID, config.shutdown_timeout_s)
            if parts is PLAIN:  # else the caller's code may follow
                _end_now(Exit.DONE)
        return
    pulse = Pulse(ranks)
    pulse.start()  # loading may take minutes
    try:
        if not ranks.is_leader:
            with asking(pulse.ask_to_stop, for_good=True):
                worker = _load(config, parts, ranks).worker(config, parts, ranks)
                worker.watch(pulse.tick)
                runtime.settle()
                Group(worker, ranks, pulse).follow()
        else:
            _lead(config, parts, ranks, pulse, on_loaded, on_started)
    except RanksLost as e:
        pulse.verdict(e)  # logs the verdict
        _end_now()
    except GuerdonError as e:
        if is_agreed(e):
            pulse.stop()  # all ranks leave, so none is missed
        raise
    pulse.stop()


def _check_repository(config: ServerConfig) -> None:
    """Raises ConfigError if nothing could ever be loaded from the folder of checkpoints."""
    root = config.model_repository
    if root is None:
        return
    if not Path(root).expanduser().is_dir():
        raise ConfigError(f"model_repository is {root!r}, which is no folder", "name the folder that holds checkpoints")
    if not Access(config).has_admin:
        raise ConfigError(
            "model_repository is set, but no key may load from it", "give somebody a key of the role admin"
        )


def _lead(
    config: ServerConfig,
    parts: Parts,
    ranks: Ranks,
    pulse: Pulse,
    on_loaded: Callable[[Service], None] | None,
    on_started: runtime.OnStarted | None,
) -> None:
    grace_s = min(config.shutdown_timeout_s, _MOST_GRACE_S)
    stop = threading.Event()
    service: Service | None = None

    def ask() -> None:
        stop.set()
        if service is not None:
            service.end()

    pulse.on_stop = ask
    with asking(ask, for_good=True):
        models = _load(config, parts, ranks)
        worker = models.worker(config, parts, ranks)
        worker.watch(pulse.tick)
        group = Group(worker, ranks, pulse)
        try:
            service = _service(config, parts, models, group, ranks, stop)
            pulse.on_lost = functools.partial(_tell_clients, service)
            if on_loaded is not None:
                on_loaded(service)
            if stop.is_set():
                service.end()
            runtime.run(service, config, on_started=on_started, grace_s=grace_s, takes_signals=False)
        except _Stopped:
            group.end()
            return
        except RanksLost:
            raise
        except Exception as e:
            if service is not None and service.is_computing:
                log.critical("this server ends during a command", exc_info=e)
                _end_now()
            group.end(e if isinstance(e, GuerdonError) else ServerFault(describe(e)))
            raise
        if not group.has_ended:
            log.error(_AMID, grace_s)
            if service.loss is None:
                service.end_after_loss(runtime.shutdown_error(grace_s))  # not done after a restart
            _end_now()


def _tell_clients(service: Service, lost: RanksLost) -> None:
    threading.Thread(target=service.end_after_loss, args=(lost,), name="guerdon-lost", daemon=True).start()
    time.sleep(_LAST_WORDS_S)  # the main thread usually ends the process before


def _end_now(status: int = EXIT_STATUS) -> NoReturn:
    """Exits without Python's own shutdown, which may wait for threads inside collectives, or abort inside torch."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _load(config: ServerConfig, parts: Parts, ranks: Ranks) -> _Models:
    """Loads this rank's part of all models; if one rank fails, all raise its error before the next model."""
    with ranks.raise_on_all_ranks():
        if ranks.size > 1 and ranks.is_leader:
            runtime.check_addresses(config)
            _check_repository(config)
        check_settings(config)
        if not config.models and config.critic is None:
            raise ConfigError(
                "no model to serve",
                "give MODEL, a folder, a hub id or module:function, or `models:` in a YAML file (--config)",
            )
    served: list[tuple[ServedModelConfig, Any]] = []
    since_ns = file_time_ns()
    for model in config.models:
        with ranks.raise_on_all_ranks():
            scorer = parts.scorer(model, ranks)
        own: Any = model
        served += zip(own.adapted(), scorer.members, strict=True) if hasattr(scorer, "members") else [(model, scorer)]
    if config.critic is None:
        return _Models(served, None, since_ns)
    with ranks.raise_on_all_ranks():
        learner = parts.trainer(config.critic, ranks)
    return _Models([*served, (infer_config(config.critic), learner)], learner, since_ns)


class _Stopped(BaseException):
    """This rank was asked to stop before it served."""


@dataclass(frozen=True)
class _Stoppable:
    """A group that refuses commands once `stop` is set."""

    group: Executor
    stop: threading.Event

    def execute(self, command: Command) -> Any:
        if self.stop.is_set():
            raise _Stopped
        return self.group.execute(command)


def _service(
    config: ServerConfig,
    parts: Parts,
    models: _Models,
    group: Executor,
    ranks: Ranks,
    stop: threading.Event | None = None,
) -> Service:
    """Builds the service over what every rank has loaded; the other ranks must follow already.

    Raises _Stopped if `stop` is set before a durable critic is restored.
    """
    loaded: Any = [
        (model, served.info) for model, served in models.served if not all_kinds.of_settings(model).is_remote
    ]
    num_on_cpu = sum(place.startswith("cpu:") for place in by_device(loaded))
    if ranks.size == 1 and num_on_cpu > 1:
        divide_cores(num_on_cpu)  # before a critic's journal is replayed: the same threads give the same weights
    of_ranks: dict[str, Any] = {
        "num_parts": ranks.data_size,
        "is_alone": ranks.size == 1,
        "since_ns": models.since_ns,
    }
    if config.critic is None:
        service = Service(group, models.served, config, parts.limits, **of_ranks)
    else:
        operations = parts.critic(config.critic, models.learner)
        try:
            operations.restore(_Stoppable(group, stop) if stop is not None else group)
            service = Service(group, models.served, config, parts.limits, operations, **of_ranks)
        except BaseException:
            operations.close()
            raise
    end_pool()  # another thread computes from now on
    if isinstance(group, Group):
        metrics = service.metrics
        metrics.set("guerdon_ranks", ranks.data_size, "data")
        metrics.set("guerdon_ranks", ranks.tensor_size, "tensor")

        def on_done(command: Command, broadcast_s: float, gather_s: float) -> None:
            metrics.observe("guerdon_broadcast_seconds", broadcast_s, command.signal.name.lower())
            metrics.observe("guerdon_gather_seconds", gather_s, command.signal.name.lower())

        group.on_done = on_done
    return service
