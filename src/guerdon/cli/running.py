"""What each subcommand does, from its settings to running parts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from guerdon.cli import console
from guerdon.core import ModelInfo
from guerdon.distributed.ranks import num_started
from guerdon.errors import ConfigError, Exit
from guerdon.settings.access import strip_credentials
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig, check_actor, describe_run
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.settings.sources import given_flags, read_actor_settings, read_critic_settings, read_server_settings


def run_serve(args: argparse.Namespace) -> None:
    """`guerdon serve`: loads the models and serves them until SIGTERM or SIGINT."""
    _serve(read_server_settings(args))


def run_serve_critic(args: argparse.Namespace) -> None:
    """`guerdon serve-critic`: loads the critic, brings it to where it was, and serves it until SIGTERM or SIGINT."""
    _serve(read_critic_settings(args))


def _serve(config: ServerConfig) -> None:
    console.set_up(config.log_level, config.log_format)
    console.need("torch", "starlette", "uvicorn")
    critic = config.critic
    named = [*(model.model for model in config.models), *([critic.model] if critic else [])]
    if critic and critic.reward_model:
        named.append(critic.reward_model)
    console.say(f"loading {', '.join(named)}" if named else "no models")
    from guerdon import assembly
    from guerdon.server.service import Service

    started: list[Service] = []

    def on_loaded(service: Service) -> None:
        started.append(service)
        console.loaded()
        for info in service.catalog.models():
            if isinstance(info, ModelInfo):
                console.say(console.described(info))
        if critic:
            console.say(f"{critic.name} learns; " + console.kept(critic))

    def on_started(http_url: str, grpc_url: str | None) -> None:
        console.say(f"ready at {http_url}" + (f" and {grpc_url}" if grpc_url else "") + "  (Ctrl-C stops it)")

    assembly.run(config, device=_device(config), on_loaded=on_loaded, on_started=on_started)
    for service in started:
        requests = service.metrics.totals("guerdon_requests", "_total")
        num_ok = sum(int(number) for (_, outcome), number in requests.items() if outcome == "ok")
        console.say(f"stopped; requests answered: {num_ok}, refused or failed: {int(sum(requests.values())) - num_ok}")
        if critic and service.critic is not None:
            console.say(console.describe_stopped(critic, service.critic.state()))


def _device(config: ServerConfig) -> str:
    """The device of every model; raises ConfigError where ranks would have several."""
    devices = sorted({model.device for model in [*config.models, *([config.critic] if config.critic else [])]})
    if len(devices) > 1 and num_started() > 1:
        raise ConfigError(
            f"the models' devices are {' and '.join(devices)}, and each rank has one", "give all models the same"
        )
    return devices[0] if devices else "auto"


def run_score(args: argparse.Namespace) -> int:
    """`guerdon score`: through servers that run, or by a model in this process.

    Returns 1 where samples failed.
    """
    console.check_alone("score")
    from guerdon.client import RewardClient
    from guerdon.client.score_file import score_file

    flags = given_flags(args, ModelConfig)
    if args.server:
        unused = next((flag for flag in flags if flag != "name"), None)
        if unused is not None:
            raise ConfigError(
                f"--{unused.replace('_', '-')} is given, but the model runs at {strip_credentials(args.server[0])}",
                "leave it out",
            )
        scorer: Any = RewardClient(args.server, model=flags.get("name", ModelConfig.name))
    else:
        console.set_up("warning")
        console.need("torch")
        from guerdon.local import LocalRewardModel

        scorer = LocalRewardModel(args.model, **flags)
    with scorer:
        summary = score_file(
            scorer,
            args.IN,
            args.out,
            template=args.template,
            retry_failed=args.retry_failed,
            progress=not args.no_progress and sys.stderr.isatty(),
        )
    sys.stderr.write(f"{summary}\n")
    return Exit.FAILED if summary.num_failed else Exit.DONE


def run_reinforce(args: argparse.Namespace) -> int:
    """`guerdon reinforce`: see guerdon.actor.reinforce."""
    config = read_actor_settings(args, ReinforceRunConfig)
    _prepare_actor(config)
    from guerdon.actor import launch, reinforce

    return launch.run(config, reinforce.train)


def run_ppo(args: argparse.Namespace) -> int:
    """`guerdon ppo`: see guerdon.actor.ppo."""
    config = read_actor_settings(args, PPORunConfig)
    _prepare_actor(config)
    from guerdon.actor import launch, ppo

    return launch.run(config, ppo.train)


def _prepare_actor(config: ReinforceRunConfig | PPORunConfig) -> None:
    """Checks the settings and the installation before anything is loaded."""
    if num_started() == 1:  # of several the first one checks them, when it has the others' ear
        check_actor(config)
    console.set_up("info")
    console.need("torch", "tensorboard", "matplotlib")
    console.say(f"loading {describe_run(config)}")  # now: torch alone takes seconds


def run_bench(args: argparse.Namespace) -> int:
    """`guerdon bench`: see guerdon.cli.bench.benching."""
    console.check_alone("bench")
    from guerdon.cli.bench import benching

    return benching.run(args)


def run_doctor(args: argparse.Namespace) -> int:
    """`guerdon doctor`: see guerdon.cli.doctor."""
    from guerdon.cli import doctor

    return doctor.run(args)
