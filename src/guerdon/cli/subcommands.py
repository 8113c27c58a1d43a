"""The subcommands: their flags, and what runs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from guerdon.cli import completion, helps, running
from guerdon.cli.parsing import Parser
from guerdon.cli.version import ShowVersions
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from guerdon.settings.sources import CRITIC_PORTS, add_section_flags, add_server_flags


def make_parser() -> Parser:
    """The parser of the whole command; `args.run(args)` runs the chosen subcommand."""
    parser = Parser("guerdon", description=helps.EXAMPLES, epilog=helps.NOTES)
    parser.add_argument(
        "--version", action=ShowVersions, nargs=0, help="show the versions of guerdon, Python and torch, and exit"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_serve(commands)
    _add_serve_critic(commands)
    _add_score(commands)
    _add_actor(commands, "reinforce", "train a policy by REINFORCE, RLOO or GRPO against a served reward model")
    _add_actor(commands, "ppo", "train a policy by PPO against a served critic")
    _add_bench(commands)
    _add_doctor(commands)
    _add_completion(commands, parser)
    return parser


def _add_serve(commands: Any) -> None:
    serve = _command(commands, "serve", "serve reward models over HTTP and gRPC", running.run_serve)
    serve.description, serve.epilog = helps.SERVE_EXAMPLES, helps.SERVE_NOTES
    serve.usage = "guerdon serve [MODEL] [--config FILE.yaml] [--FLAG VALUE ...]"
    serve.add_argument("MODEL", nargs="?", help="local folder, hub id, or module:function")
    serve.add_argument("--config", metavar="FILE.yaml", help="read settings from this file; it may name several models")
    add_server_flags(serve, ServerConfig, ModelConfig)


def _add_serve_critic(commands: Any) -> None:
    critic = _command(
        commands, "serve-critic", "serve a critic that trains, over HTTP and gRPC", running.run_serve_critic
    )
    critic.description, critic.epilog = helps.CRITIC_EXAMPLES, helps.CRITIC_NOTES
    critic.usage = "guerdon serve-critic [MODEL] [--config FILE.yaml] [--FLAG VALUE ...]"
    critic.add_argument("MODEL", nargs="?", help="local folder or hub id of a reward model or a critic")
    critic.add_argument("--config", metavar="FILE.yaml", help="read settings from this file")
    add_server_flags(critic, ServerConfig, CriticConfig, defaults=CRITIC_PORTS)


def _add_score(commands: Any) -> None:
    score = _command(commands, "score", "score a JSONL file", running.run_score)
    score.description, score.epilog = helps.SCORE_EXAMPLES, helps.SCORE_NOTES
    score.usage = "guerdon score (--server URL | --model MODEL) IN -o OUT [--FLAG VALUE ...]"
    score.add_argument("IN", help="JSONL file, or .jsonl.gz; - is stdin")
    score.add_argument(
        "-o", "--out", metavar="OUT", required=True, help="JSONL file to write or to continue; - is stdout"
    )
    where = score.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", action="append", metavar="URL", help="http:// or grpc:// address; repeat it to share the load"
    )
    where.add_argument("--model", metavar="MODEL", help="load this model here instead: folder, hub id, module:function")
    score.add_argument("--template", action="store_true", help="put prompt and response through the chat template")
    score.add_argument("--retry-failed", action="store_true", help="score rows of OUT with failed samples again")
    score.add_argument(
        "--no-progress", action="store_true", help="no progress bar; there is none where stderr is no terminal"
    )
    add_server_flags(score, ModelConfig)


def _add_actor(commands: Any, name: str, text: str) -> None:
    run, cls, examples, notes = {
        "reinforce": (
            running.run_reinforce,
            ReinforceRunConfig,
            helps.REINFORCE_EXAMPLES,
            helps.REINFORCE_NOTES,
        ),
        "ppo": (running.run_ppo, PPORunConfig, helps.PPO_EXAMPLES, helps.PPO_NOTES),
    }[name]
    actor = _command(commands, name, text, run)
    actor.description, actor.epilog = examples, notes
    actor.usage = f"guerdon {name} CONFIG.yaml [--SECTION.SETTING VALUE ...]"
    actor.add_argument("CONFIG", metavar="CONFIG.yaml", help="YAML file with the settings")
    add_section_flags(actor, cls)


def _add_bench(commands: Any) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        from guerdon.cli.bench import benching

        benching.add(parser)

    bench = _command(commands, "bench", "measure a server under the load of a trainer", running.run_bench, add)
    bench.description = helps.BENCH_EXAMPLES
    bench.usage = "guerdon bench URL ... [--FLAG VALUE ...]"


def _add_doctor(commands: Any) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        from guerdon.cli import doctor

        doctor.add(parser)

    parser = _command(
        commands, "doctor", "say what is installed, what is there, and what to do", running.run_doctor, add
    )
    parser.description = helps.DOCTOR_EXAMPLES


def _add_completion(commands: Any, whole: Parser) -> None:
    parser = _command(commands, "completion", "print a script that completes these words in a shell", completion.run)
    parser.description = helps.COMPLETION_EXAMPLES
    parser.add_argument("SHELL", choices=completion.SHELLS, help="whose script: %(choices)s")
    parser.set_defaults(parser=whole)


def _command(
    commands: Any,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int | None],
    late: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, late=late)
    parser.set_defaults(run=run)
    return parser
