"""The subcommands: flags and functions."""

from __future__ import annotations

import argparse
import functools
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from guerdon import __version__, memory
from guerdon.cli import console, helps
from guerdon.cli.check_forms import NAMES
from guerdon.cli.parser import SHELLS, Parser, completion_script
from guerdon.core import ModelInfo
from guerdon.distributed.layout import wants_ranks
from guerdon.distributed.ranks import num_started
from guerdon.endings import Ending
from guerdon.errors import SERVER_MODULES, ConfigError, Exit, require_modules
from guerdon.kinds import all_kinds
from guerdon.kinds.kind import Subcommand
from guerdon.settings import sources
from guerdon.settings.access import strip_credentials
from guerdon.settings.actors import (
    ActorConfig,
    DistillRunConfig,
    PPORunConfig,
    ReinforceRunConfig,
    check_actor,
    describe_run,
)
from guerdon.settings.config import ModelConfig, ParallelConfig, ServerConfig, TeacherConfig


def make_parser() -> Parser:
    """Returns the parser of the whole command line; `args.run(args)` runs the subcommand that it has parsed."""
    parser = Parser("guerdon", description=helps.EXAMPLES, epilog=helps.NOTES)
    parser.add_argument(
        "--version", action=_ShowVersions, nargs=0, help="Show the versions of guerdon, Python and torch, and exit."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for kind in all_kinds.KINDS:
        if kind.command is not None:
            _add_server(commands, kind.settings, kind.command)
    _add_score(commands)
    _add_logprobs(commands)
    for name, actor in _ACTORS.items():
        _add_actor(commands, name, *actor)
    doctor = _add_command(commands, "doctor", "Check the installation, the machine and servers.", run_doctor)
    doctor.usage = "guerdon doctor [--rubric FILE --rows FILE] [--json] [URL|MODEL ...]"
    doctor.add_argument(
        "TARGET", nargs="*", metavar="URL|MODEL",
        help="Servers (http:// or grpc:// URLs) and models (folders or hub ids) to check as well.",
    )  # fmt: skip
    doctor.add_argument("--rubric", metavar="FILE", help="Try this rubric on --rows with the one MODEL as the judge.")
    doctor.add_argument("--rows", metavar="FILE", help="JSONL file, of which the first ten rows are judged.")
    doctor.add_argument("--json", action="store_true", help="Write the findings as JSON.")
    _add_check(commands)
    _add_convert(commands)
    what = "Print a script that completes commands in a shell."
    completion = _add_command(commands, "completion", what, run_completion)
    completion.add_argument("SHELL", choices=SHELLS, help="Shell of the script: %(choices)s.")
    completion.set_defaults(parser=parser)
    return parser


def _add_command(
    commands: Any,
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int | None],
    texts: tuple[str, str | None] = ("", None),
) -> Parser:
    parser: Parser = commands.add_parser(name, help=summary)
    parser.description, parser.epilog = helps.COMMANDS.get(name, texts)
    parser.set_defaults(run=run)
    return parser


class _ShowVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata  # slow to import

        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "not installed"
        sys.stdout.write(f"guerdon {__version__}\npython {platform.python_version()}\ntorch {torch}\n")
        parser.exit()


# serve, and the others that serve a kind of model


def _add_server(commands: Any, settings: Any, command: Subcommand) -> None:
    parser = _add_command(
        commands, command.name, command.summary, lambda args: _serve(command.read(args)), command.help
    )
    parser.show_first(*command.first.split())
    parser.usage = f"guerdon {command.name} [MODEL] [--{command.first.partition(' ')[0]} FILE.yaml] [--FLAG VALUE ...]"
    parser.add_argument("MODEL", nargs="?", help=settings.__dataclass_fields__["model"].metadata["help"])
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="Read settings from this file, which may name several models."
    )
    sources.add_server_flags(parser, ServerConfig, settings, defaults=command.defaults)


@memory.holding_collections()
def _serve(config: ServerConfig) -> int:
    console.set_up_logging(config.log_level, config.log_format)
    require_modules(*SERVER_MODULES, extra="server")
    critic = config.critic
    loaded: Any = [model for model in config.models if not all_kinds.of_settings(model).is_remote]
    devices = sorted({model.device for model in (*loaded, critic) if model}) or ["auto"]
    if len(devices) > 1 and (num_started() > 1 or wants_ranks(config)):
        raise ConfigError(
            f"the models' devices are {' and '.join(devices)}, but each rank has one", "give all models the same device"
        )
    if wants_ranks(config):
        from guerdon.server import runtime

        runtime.check_addresses(config)
        return _launch(config, devices[0], functools.partial(_serve, config), _SERVER_MODULES)
    paths = [model.model for model in loaded] + ([critic.model, critic.reward_model] if critic else [])
    if paths:
        console.say(f"loading {', '.join(filter(None, paths))}")
    elif config.models:
        console.say("nothing to load: the models are other servers'")
    from guerdon import assembly
    from guerdon.server.service import Service

    started: list[Service] = []

    def on_loaded(service: Service) -> None:
        started.append(service)
        console.redirect_library_logs()
        for info in service.catalog.models():
            if isinstance(info, ModelInfo):
                console.say(console.describe_model(info))
                if info.proofs:
                    console.say(f"{info.name}, proved: {'; '.join(info.proofs)}")
                if ending := console.describe_ending(info.name, Ending.parse(info.ending), info.outputs):
                    console.say(ending)
        if len(service.loops.places) > 1:
            console.say(console.describe_places(service.loops.places))
        if critic:
            console.say(console.describe_persistence(critic))

    def on_started(http_url: str, grpc_url: str | None) -> None:
        console.say(f"ready at {http_url}" + (f" and {grpc_url}" if grpc_url else "") + "  (Ctrl-C stops it)")

    assembly.run(config, device=devices[0], on_loaded=on_loaded, on_started=on_started)
    for service in started:
        requests = service.metrics.totals("guerdon_requests", "_total")
        num_ok = sum(int(number) for (_, outcome), number in requests.items() if outcome == "ok")
        summary = f"stopped; requests answered: {num_ok}, refused or failed: {int(sum(requests.values())) - num_ok}"
        sequences = service.metrics.totals("guerdon_sequences", "_total")
        num_lost = int(sum(sequences.get((name, "failed"), 0) for name in service.catalog.entries))
        console.say(summary + (f"; samples without a score: {num_lost}" if num_lost else ""))
        if critic and service.critic is not None:
            console.say(console.describe_stopped(critic, service.critic.state()))
    return Exit.DONE


# the ranks that a command starts itself

_MODELS = ("guerdon.distributed.joining", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_SERVER_MODULES = (
    "guerdon.assembly", "guerdon.engine.checkpoint.reward_models", "guerdon.engine.engine",
    "guerdon.training.critic_trainer", *_MODELS,
)  # fmt: skip
_ACTOR_MODULES = (
    "guerdon.actor.reinforce", "guerdon.actor.ppo", "guerdon.actor.distill", *_MODELS,
)  # fmt: skip
"""The slow imports of a rank, preloaded only to start it faster."""


def _launch(config: ParallelConfig, device: str, work: Callable[[], int], modules: tuple[str, ...]) -> int:
    """Does `work` on the ranks that the settings ask for, which import `modules` first; returns the exit status."""
    from guerdon.distributed import launcher
    from guerdon.distributed.layout import choose_layout

    layout = choose_layout(config, device)
    console.say(str(layout))
    work = functools.partial(console.exit_status, work)
    return launcher.launch(layout, work, max_restarts=config.max_restarts, preload=modules)


# score


def _add_score(commands: Any) -> None:
    parser = _add_command(commands, "score", "Score a JSONL file.", run_score)
    parser.show_first(
        "out", "server", "model", "name", "template", "plot", "retry_failed", "no_progress", "dtype", "max_length",
    )  # fmt: skip
    parser.usage = "guerdon score (--server URL | --model MODEL) IN -o OUT [--FLAG VALUE ...]"
    parser.add_argument("IN", help="JSONL file, or .jsonl.gz; - is stdin.")
    parser.add_argument(
        "-o", "--out", metavar="OUT", required=True, help="JSONL file to write or to continue; - is stdout."
    )
    _add_answerer(parser, "Load this model instead: folder, hub id, or module:function.")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="Draw the rewards; for pairs also margins and accuracy by category."
    )
    parser.add_argument("--retry-failed", action="store_true", help="Score rows of OUT with failed samples again.")
    sources.add_server_flags(parser, ModelConfig)


def _add_answerer(parser: argparse.ArgumentParser, model_help: str) -> None:
    """Adds the flags of who answers about a file's rows, and how they are read and shown."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", action="append", metavar="URL", help="http:// or grpc:// URL. Repeat it to share the load."
    )
    where.add_argument("--model", metavar="MODEL", help=model_help)
    parser.add_argument("--template", action="store_true", help="Put prompts and responses through the chat template.")
    parser.add_argument(
        "--no-progress", action="store_true", help="Show no progress bar; it is shown only on terminals."
    )


def _ask_servers(args: argparse.Namespace, config: type[Any], client: type[Any], progress: bool) -> Any:
    """Returns a client of the servers; None if the model is to be loaded here, for which the process is ready then.

    Raises ConfigError for a setting of the model that the servers run.
    """
    flags = sources.given_flags(args, config)
    if not args.server:
        console.set_up_logging("warning", once=True)  # a function may fail on every row; the summary counts these
        require_modules(*SERVER_MODULES, extra="server")
        if progress:  # at once: torch's import takes seconds
            sys.stderr.write(f"loading {args.model}\n")
        return None
    if unused := [flag.replace("_", "-") for flag in flags if flag != "name"]:
        server = strip_credentials(args.server[0])
        raise ConfigError(f"--{unused[0]} is given, but the model runs at {server}", "leave it out")
    console.require_grpc(args.server)
    return client(args.server, model=flags.get("name", config.name))


def run_score(args: argparse.Namespace) -> int:
    """Scores a file through servers or by a model in this process; returns 1 if samples failed."""
    console.check_single_process("score")
    from guerdon.cli import score_plot  # late: its imports would slow every command down
    from guerdon.client import RewardClient
    from guerdon.client.score_file import score_file

    if args.plot:
        score_plot.check_plot(args.plot)
    progress = not args.no_progress and sys.stderr.isatty()
    scorer = _ask_servers(args, ModelConfig, RewardClient, progress)
    if scorer is None:
        from guerdon.local import LocalRewardModel

        scorer = LocalRewardModel(args.model, **sources.given_flags(args, ModelConfig))
    with scorer:
        summary = score_file(
            scorer, args.IN, args.out, template=args.template, retry_failed=args.retry_failed, progress=progress
        )
        is_chat = summary.num_rows > summary.num_resumed and {"tokens", "messages"} <= scorer.info().inputs.keys()
    sys.stderr.write(f"{summary}\n" + (f"\n{summary.pairs}\n" if len(summary.pairs) else ""))
    if is_chat and summary.num_joined and not args.template:
        sys.stderr.write(
            "note: the model has a chat template, and texts were scored without it; --template applies it\n"
        )
    if args.plot:
        score_plot.draw(summary, args.plot, args.model or strip_credentials(args.server[0]), Path(args.IN).name)
    return Exit.FAILED if summary.num_failed else Exit.DONE


# logprobs


def _add_logprobs(commands: Any) -> None:
    parser = _add_command(
        commands, "logprobs", "Write a teacher's log-probs of a JSONL file's responses.", run_logprobs
    )
    parser.show_first(
        "out", "server", "model", "name", "top_k", "temperature", "template", "no_progress", "dtype", "max_length"
    )
    parser.usage = "guerdon logprobs (--server URL | --model MODEL) IN -o FOLDER [--FLAG ...]"
    parser.add_argument("IN", help="JSONL file, or .jsonl.gz.")
    parser.add_argument("-o", "--out", metavar="FOLDER", required=True, help="Folder to write or to continue.")
    _add_answerer(parser, "Load this language model instead: a folder or hub id.")
    parser.add_argument("--top-k", type=int, default=32, help="How many of the likeliest ids to keep. Default: 32.")
    parser.add_argument("--temperature", type=float, default=1.0, help="Divides the logits. Default: 1.")
    sources.add_server_flags(parser, TeacherConfig)


def run_logprobs(args: argparse.Namespace) -> int:
    """Writes the log-probs through servers or by a model in this process; returns 1 if samples failed."""
    console.check_single_process("logprobs")
    from guerdon.client import TeacherClient
    from guerdon.client.logprob_file import write_logprobs

    progress = not args.no_progress and sys.stderr.isatty()
    teacher = _ask_servers(args, TeacherConfig, TeacherClient, progress)
    if teacher is None:
        from guerdon.local import LocalTeacher

        flags = sources.given_flags(args, TeacherConfig)
        most = max(args.top_k, flags.pop("max_top_k", TeacherConfig.max_top_k))
        teacher = LocalTeacher(args.model, max_top_k=most, **flags)
    with teacher:
        summary = write_logprobs(
            teacher,
            args.IN,
            args.out,
            top_k=args.top_k,
            temperature=args.temperature,
            template=args.template,
            progress=progress,
        )
    sys.stderr.write(f"{summary}\n")
    return Exit.FAILED if summary.num_failed else Exit.DONE


# reinforce, ppo, distill

_ACTORS: dict[str, tuple[str, type[ActorConfig], str]] = {
    "reinforce": (
        "Train a policy by REINFORCE, RLOO or GRPO.", ReinforceRunConfig,
        "reinforce.kl_coefficient reinforce.advantage_estimator",
    ),
    "ppo": (
        "Train a policy by PPO with a served critic.", PPORunConfig, "ppo.kl_coefficient ppo.critic_warmup_steps"
    ),
    "distill": (
        "Distil a served teacher into a policy.", DistillRunConfig, "distill.global_batch_size teacher.url"
    ),
}  # fmt: skip
"""Each actor's command: its summary, its settings, and the flags that `--help` shows besides those of all actors."""


def _add_actor(commands: Any, name: str, summary: str, cls: type[ActorConfig], first: str) -> None:
    parser = _add_command(commands, name, summary, lambda args: _train(sources.read_actor_settings(args, cls)))
    parser.show_first(
        "policy.model", "policy.learning_rate", "data.prompts", "rollouts.rollouts_per_prompt",
        "rollouts.max_new_tokens", "rollouts.temperature", "run.steps", "run.output_dir", *first.split(),
    )  # fmt: skip
    parser.usage = f"guerdon {name} CONFIG.yaml [--SECTION.SETTING VALUE ...]"
    parser.add_argument("CONFIG", metavar="CONFIG.yaml", help="YAML file with the settings.")
    sources.add_section_flags(parser, cls)


def _train(config: ActorConfig) -> int:
    from guerdon.actor import prompt_sources

    if num_started() == 1:  # with several ranks, the first checks them once the others are connected
        check_actor(config)
        prompt_sources.check_prompts(config.data)
    console.set_up_logging("info")
    require_modules(*SERVER_MODULES, "tensorboard", "matplotlib", extra="actor")
    if config.rollouts.engine == "vllm":
        require_modules("vllm", extra="vllm")
    if wants_ranks(config.parallel):
        return _launch(config.parallel, config.policy.device, functools.partial(_train, config), _ACTOR_MODULES)
    console.say(f"loading {describe_run(config)}")  # before torch is imported, which takes seconds
    from guerdon.actor.training_run import train_on_ranks

    return train_on_ranks(config, import_module(f"guerdon.actor.{config.ALGORITHM}").train)


# doctor, check, convert, completion


def run_doctor(args: argparse.Namespace) -> int:
    """Prints every finding as it comes, and the number of problems; returns 1 if there is one."""
    from guerdon.cli import doctor, doctor_model, findings

    if args.rubric or args.rows:
        if not (args.rubric and args.rows and len(args.TARGET) == 1):
            raise ConfigError("a rubric is tried by one model on one file", "give MODEL, --rubric FILE and --rows FILE")
        tried = doctor_model.examine_rubric(args.TARGET[0], args.rubric, args.rows)
        return Exit.FAILED if findings.report(tried, as_json=args.json) else Exit.DONE
    return Exit.FAILED if findings.report(doctor.examine(args.TARGET), as_json=args.json) else Exit.DONE


def _add_check(commands: Any) -> None:
    parser = _add_command(commands, "check", "Try a server of rewards or log-probs for known faults.", run_check)
    parser.usage = "guerdon check URL [--form FORM] [--reference FOLDER] [--FLAG VALUE ...]"
    parser.add_argument("URL", help="http:// or https:// URL of any server that answers one of the forms.")
    parser.add_argument(
        "--form", metavar="FORM", help=f"How to ask: a file, or {', '.join(NAMES)} (default: the first that answers)."
    )
    parser.add_argument("--name", metavar="MODEL", help="Served model (default: the first that the server lists).")
    parser.add_argument("--reference", metavar="FOLDER", help="Compare with this checkpoint by plain transformers.")
    parser.add_argument(
        "--max-length", type=int, help="Longest sequence (default: the server's, else the reference's)."
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-3,
        help="Largest difference, as a share of the scores' standard deviation (default: %(default)s).",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=60.0, help="Seconds for each request (default: %(default)s).")
    parser.add_argument("--json", action="store_true", help="Write the outcomes as JSON.")


def run_check(args: argparse.Namespace) -> int:
    """Tries a server; returns 1 if it fell short in a trial."""
    console.check_single_process("check")
    from guerdon.cli import check

    return Exit.FAILED if check.check(args) else Exit.DONE


def _add_convert(commands: Any) -> None:
    parser = _add_command(
        commands, "convert", "Convert a GGUF file, an adapter or InternLM2 to a folder that can be served.", run_convert
    )
    parser.usage = "guerdon convert FILE.gguf|ADAPTER|MODEL FOLDER [--base BASE] [--dtype D]"
    parser.add_argument(
        "FILE",
        metavar="FILE.gguf|ADAPTER|MODEL",
        help="GGUF file of a causal language model, or an adapter's or InternLM2's folder or hub id.",
    )
    parser.add_argument("FOLDER", help="Folder to write: weights, config, tokenizer. It must be new or empty.")
    parser.add_argument("--base", help="Base model of an adapter; by default the one that adapter_config.json names.")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="Type of the written weights (default: %(default)s).",
    )  # fmt: skip


def run_convert(args: argparse.Namespace) -> None:
    """Converts a GGUF file, an adapter or InternLM2 to a folder that transformers and guerdon load."""
    console.check_single_process("convert")
    require_modules(*SERVER_MODULES, extra="server")
    console.say(f"reading {args.FILE}")
    from guerdon.engine.checkpoint.converting import convert_adapter, convert_gguf, read_gguf
    from guerdon.engine.checkpoint.stored import open_checkpoint

    if Path(args.FILE).is_dir() or not (args.FILE.endswith(".gguf") or Path(args.FILE).is_file()):
        checkpoint = open_checkpoint(args.FILE, base=args.base)
        what = checkpoint.origin.adapter
        console.say(f"{'merging ' + what if what else 'converting ' + str(checkpoint.folder)} -> {args.dtype}")
        convert_adapter(checkpoint, Path(args.FOLDER), args.dtype)
        console.say(f"wrote {args.FOLDER}")
        return
    if args.base is not None:
        raise ConfigError("--base is given, and a GGUF file has no base model", "leave it out")
    file = read_gguf(Path(args.FILE))
    parameters = f"{file.architecture}, {file.num_parameters / 1e6:,.0f} million parameters"
    console.say(f"converting {parameters}, {file.quantised_as or 'not quantised'} -> {args.dtype}")
    convert_gguf(file, Path(args.FOLDER), args.dtype)
    lossy = f": dequantised from {file.quantised_as}, not the original weights" if file.quantised_as else ""
    console.say(f"wrote {args.FOLDER}{lossy}")


def run_completion(args: argparse.Namespace) -> None:
    """Prints a completion script."""
    sys.stdout.write(completion_script(args.parser, args.SHELL))
