"""The `guerdon` command: each subcommand from its settings to running parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from guerdon import __version__, console
from guerdon.access import without_key
from guerdon.actor.settings import PPORunConfig, ReinforceRunConfig, check_actor
from guerdon.config import CriticConfig, ModelConfig, ServerConfig
from guerdon.core import ModelInfo
from guerdon.distributed.ranks import num_started
from guerdon.errors import ConfigError, GuerdonError, StartError
from guerdon.flags import (
    CRITIC_PORTS,
    add_sections,
    add_settings,
    critic_server_config,
    given,
    sectioned_config,
    server_config,
)

EXAMPLES = """\
examples:
  guerdon serve ./my-reward-model                          a folder as transformers saves it, on port 5555
  guerdon serve some-org/reward-model --dtype bfloat16     a model of the Hugging Face hub
  guerdon serve my_module:my_function                      your own scorer
  guerdon serve --config server.yaml                       several models
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic     a critic that trains, on port 5556
  guerdon score --server http://127.0.0.1:5555 in.jsonl -o out.jsonl
  guerdon score --model ./my-reward-model in.jsonl -o out.jsonl
  guerdon reinforce run.yaml                               train a policy with REINFORCE against a served model
  guerdon ppo run.yaml                                     train one with PPO against a served critic
  guerdon demo                                             serve a small reward model, train a policy against it
"""

SERVE_EXAMPLES = """\
A YAML file has the same settings; flags go before it:

  port: 5555
  models:
    - {model: ./helpful, name: helpful, dtype: bfloat16}
    - {model: ./safe, name: safe, max_length: 4096}
    - {model: "my_module:brevity", name: brevity}
  rewards:                  # a weighted sum; it is what clients get that name no model
    - name: reward_model
      components:
        - {model: helpful, normalize: given, mean: 1.2, std: 3.0}
        - {model: safe, weight: 0.5, normalize: running, clip: 5}
        - {model: brevity, weight: 0.1}

A function has a first parameter `texts`, `responses` or `tokens`, and may have `prompts` and `labels`, which clients
send beside the samples. With `normalize: running` a reward depends on what was scored before it; guerdon_component_mean
and guerdon_component_std under /metrics tell what to give for the same rewards every time.
"""

CRITIC_EXAMPLES = """\
MODEL is any checkpoint of a decoder that `guerdon serve` loads; a reward model's head becomes the value head. Clients
find models named critic_infer, critic_train, critic_validate, critic_save, critic_load, critic_offload, critic_onload
and critic_state, and a Python client is guerdon.CriticClient.

  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic --reward-model ./my-reward-model
  guerdon serve-critic --config critic.yaml

With --checkpoint-dir a train request that was answered survives the server: the same command again loads the newest
checkpoint and applies what came after it. A YAML file has the same settings; flags go before it:

  port: 5556
  critic:
    model: ./my-reward-model
    checkpoint_dir: ./critic
    global_batch_size: 64
    learning_rate: 9e-6
"""

SCORE_EXAMPLES = """\
Each line of IN is one of {"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"}, {"messages"},
{"text"}; a name in .gz is read compressed. OUT gets the same lines with "rewards" added, in the same order. The same
command again continues where it stopped, with the same weights. A sample that fails has null for its reward, "errors"
says why, and the exit status is 1. A function that scores may read a line's "prompt", and its "label", any JSON value.
"""


REINFORCE_EXAMPLES = """\
CONFIG.yaml has the same settings in sections; flags go before it. With this run.yaml

  policy: {model: ./my-policy, learning_rate: 1e-6}
  data: {prompts: prompts.jsonl}
  rollouts: {rollouts_per_prompt: 8, max_new_tokens: 256}
  reinforce: {advantage_estimator: rloo, kl_coefficient: 0.01}
  remote_rm: {reward_model: {ip: 127.0.0.1, port: 5555}}
  run: {steps: 200, output_dir: out/run}

  guerdon serve ./my-reward-model
  guerdon reinforce run.yaml --rollouts.temperature 0.9

The same command again goes on from the newest checkpoint in run.output_dir. Metrics, curves, samples and the policy lie
there; each checkpoint's policy is a model that transformers loads.
"""

PPO_EXAMPLES = """\
CONFIG.yaml has the same settings in sections; flags go before it. With this run.yaml

  policy: {model: ./my-policy, learning_rate: 1e-6}
  data: {prompts: prompts.jsonl}
  rollouts: {rollouts_per_prompt: 1, max_new_tokens: 256}
  ppo: {kl_coefficient: 0.01, critic_warmup_steps: 5}
  remote_critic_rm: {critic: {ip: 127.0.0.1, port: 5556}, combine_rm_and_critic_server: true}
  run: {steps: 200, output_dir: out/run}

  guerdon serve-critic ./my-reward-model --reward-model ./my-reward-model --checkpoint-dir ./critic
  guerdon ppo run.yaml --run.steps 500

Checkpoints of policy and critic are saved as a pair, and the same command again goes on from the newest pair.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for what failed on the way, 2 for what cannot start."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except StartError as e:
        return console.fail(e, e.help, 2)
    except GuerdonError as e:
        return console.fail(e, None, 1)
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `args.run(args)` runs the chosen subcommand."""
    parser = _Parser(
        "guerdon",
        description="Serves reward models and critics that train, and scores with them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"guerdon {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    serve = _command(commands, "serve", "serve reward models over HTTP and gRPC", SERVE_EXAMPLES, run_serve)
    serve.add_argument("MODEL", nargs="?", help="local folder, hub id, or module:function")
    serve.add_argument("--config", metavar="FILE.yaml", help="read settings from this file; it may name several models")
    add_settings(serve.add_argument_group("server"), ServerConfig)
    add_settings(serve.add_argument_group("model"), ModelConfig)

    critic = _command(
        commands, "serve-critic", "serve a critic that trains, over HTTP and gRPC", CRITIC_EXAMPLES, run_serve_critic
    )
    critic.add_argument("MODEL", nargs="?", help="local folder or hub id of a reward model or a critic")
    critic.add_argument("--config", metavar="FILE.yaml", help="read settings from this file")
    add_settings(critic.add_argument_group("server"), ServerConfig, CRITIC_PORTS)
    add_settings(critic.add_argument_group("critic"), CriticConfig)

    score = _command(commands, "score", "score a JSONL file", SCORE_EXAMPLES, run_score)
    score.add_argument("IN", help="JSONL file, or .jsonl.gz")
    score.add_argument("-o", "--out", metavar="OUT", required=True, help="JSONL file to write or to continue")
    where = score.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", action="append", metavar="URL", help="http:// or grpc:// address; repeat it to share the load"
    )
    where.add_argument("--model", metavar="MODEL", help="load this model here instead: folder, hub id, module:function")
    score.add_argument("--template", action="store_true", help="put prompt and response through the chat template")
    score.add_argument("--retry-failed", action="store_true", help="score rows of OUT with failed samples again")
    score.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_settings(score.add_argument_group("model", "--name goes with both; the others only with --model"), ModelConfig)

    for name, text, epilog, run, cls in (
        (
            "reinforce",
            "train a policy by REINFORCE, RLOO or GRPO against a served reward model",
            REINFORCE_EXAMPLES,
            run_reinforce,
            ReinforceRunConfig,
        ),
        ("ppo", "train a policy by PPO against a served critic", PPO_EXAMPLES, run_ppo, PPORunConfig),
    ):
        actor = _command(commands, name, text, epilog, run)
        actor.usage = f"guerdon {name} CONFIG.yaml [--SECTION.SETTING VALUE ...]"
        actor.add_argument("CONFIG", metavar="CONFIG.yaml", help="YAML file with the settings")
        add_sections(actor, cls)

    demo = _command(commands, "demo", "serve a small reward model and train a small policy against it", None, run_demo)
    demo.add_argument("--seed", type=int, default=7, help="of models, prompts and responses (default: 7)")
    demo.add_argument("--steps", type=int, default=60, help="steps in which the policy learns (default: 60)")
    demo.add_argument(
        "--data", metavar="FILE", help='score this JSONL or .jsonl.gz of {"prompt", "responses"}; nothing else is done'
    )
    demo.add_argument("--limit", type=int, default=100, metavar="N", help="at most N prompts of FILE (default: 100)")
    demo.add_argument("--out", default="out/demo", metavar="FOLDER", help="where results go (default: out/demo)")
    return parser


def run_serve(args: argparse.Namespace) -> None:
    """`guerdon serve`: loads the models and serves them until SIGTERM or SIGINT."""
    _serve(server_config(args))


def run_serve_critic(args: argparse.Namespace) -> None:
    """`guerdon serve-critic`: loads the critic, brings it to where it was, and serves it until SIGTERM or SIGINT."""
    _serve(critic_server_config(args))


def _serve(config: ServerConfig) -> None:
    console.set_up(config.log_level)
    console.need("torch", "starlette", "uvicorn")
    critic = config.critic
    named = [*(model.model for model in config.models), *([critic.model] if critic else [])]
    if critic and critic.reward_model:
        named.append(critic.reward_model)
    console.say(f"loading {', '.join(named)}" if named else "no models")
    from guerdon import assembly
    from guerdon.server.service import Service

    def on_loaded(service: Service) -> None:
        for info in service.models():
            if isinstance(info, ModelInfo):
                console.say(console.described(info))
        if critic:
            console.say(f"{critic.name} learns; " + console.kept(critic))

    def on_started(http_url: str, grpc_url: str | None) -> None:
        console.say(f"ready at {http_url}" + (f" and {grpc_url}" if grpc_url else "") + "  (Ctrl-C stops it)")

    assembly.run(config, device=_device(config), on_loaded=on_loaded, on_started=on_started)


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
    from guerdon.client.files import score_file

    flags = given(args, ModelConfig)
    if args.server:
        unused = next((flag for flag in flags if flag != "name"), None)
        if unused is not None:
            raise ConfigError(
                f"--{unused.replace('_', '-')} is given, but the model runs at {without_key(args.server[0])}",
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
            progress=not args.no_progress,
        )
    print(summary, file=sys.stderr)
    return 1 if summary.num_failed else 0


def run_reinforce(args: argparse.Namespace) -> int:
    """`guerdon reinforce`: see guerdon.actor.reinforce."""
    config = sectioned_config(args, ReinforceRunConfig)
    _prepare_actor(config)
    from guerdon.actor import launch, reinforce

    return launch.run(config, reinforce.train)


def run_ppo(args: argparse.Namespace) -> int:
    """`guerdon ppo`: see guerdon.actor.ppo."""
    config = sectioned_config(args, PPORunConfig)
    _prepare_actor(config)
    from guerdon.actor import launch, ppo

    return launch.run(config, ppo.train)


def _prepare_actor(config: ReinforceRunConfig | PPORunConfig) -> None:
    """Checks the settings and the installation before anything is loaded."""
    if num_started() == 1:  # of several the first one checks them, when it has the others' ear
        check_actor(config)
    console.set_up("info")
    console.need("torch", "tensorboard", "matplotlib")


def run_demo(args: argparse.Namespace) -> int:
    """`guerdon demo`: see guerdon.demo."""
    console.check_alone("demo")
    console.need("torch", "starlette", "uvicorn", "tensorboard", "matplotlib")
    if args.data:
        from guerdon.demo import scoring

        scoring.run(Path(args.out), Path(args.data), args.limit)
        return 0
    from guerdon.demo import run

    return run.run(Path(args.out), args.seed, args.steps)


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Takes flags with the underscores that their settings have in YAML, too."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_hyphenated(arg) for arg in given], namespace)

    def error(self, message: str) -> NoReturn:
        """Ends as every start error does: what is wrong, and what to do."""
        sys.exit(console.fail(message, f"`{self.prog} --help` lists what can be given", 2))


def _hyphenated(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def _command(commands: Any, name: str, text: str, epilog: str | None, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser
