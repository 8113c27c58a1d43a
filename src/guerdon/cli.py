"""The `guerdon` command: flags and YAML to settings, and settings to running parts."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from guerdon import __version__
from guerdon.config import ModelConfig, ServerConfig, check, from_mapping, read_yaml, takes_auto
from guerdon.core import ModelInfo
from guerdon.errors import ConfigError, GuerdonError, StartError

EXAMPLES = """\
examples:
  guerdon serve ./my-reward-model                          a folder as transformers saves it, on port 5555
  guerdon serve some-org/reward-model --dtype bfloat16     a model of the Hugging Face hub
  guerdon serve my_module:my_function                      your own scorer
  guerdon serve --config server.yaml                       several models
  guerdon score --server http://127.0.0.1:5555 in.jsonl -o out.jsonl
  guerdon score --model ./my-reward-model in.jsonl -o out.jsonl
  guerdon demo                                             make a small model, serve it, score prompts
"""

SERVE_EXAMPLES = """\
A YAML file has the same settings; flags go before it:

  port: 5555
  models:
    - {model: ./helpful, name: helpful, dtype: bfloat16}
    - {model: ./safe, name: safe, max_length: 4096}
"""

SCORE_EXAMPLES = """\
Each line of IN is one of {"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"}, {"messages"},
{"text"}; a name in .gz is read compressed. OUT gets the same lines with "rewards" added, in the same order. The same
command again continues where it stopped, with the same weights. A sample that fails has null for its reward, "errors"
says why, and the exit status is 1.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for what failed on the way, 2 for what cannot start."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except StartError as e:
        return _fail(e, e.help, 2)
    except GuerdonError as e:
        return _fail(e, None, 1)
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `args.run(args)` runs the chosen subcommand."""
    parser = _Parser(
        "guerdon",
        description="Serves reward models, and scores with them.",
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

    demo = _command(commands, "demo", "make a small reward model, serve it, score prompts with it", None, run_demo)
    demo.add_argument("--data", metavar="FILE", help='JSONL or .jsonl.gz of {"prompt", "responses"}; default: built in')
    demo.add_argument("--limit", type=int, default=100, metavar="N", help="at most N prompts of FILE (default: 100)")
    demo.add_argument("--out", default="out/demo", metavar="FOLDER", help="where results go (default: out/demo)")
    return parser


def add_settings(group: argparse._ArgumentGroup, cls: type) -> None:
    """One flag for each field of the dataclass `cls`; a flag that is not given leaves no trace in the result."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.metadata["flag"]:
            continue
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%")
        hint, default = hints[field.name], field.default
        if isinstance(hint, types.UnionType):
            hint = next(a for a in typing.get_args(hint) if a is not type(None))
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if hint is bool:
            group.add_argument(flag, help=text, action=argparse.BooleanOptionalAction, **options)
            continue
        automatic = takes_auto(field, hints[field.name])
        if default is not None or automatic:
            text += f" (default: {'auto' if automatic else default})"
        if typing.get_origin(hint) is Literal:
            group.add_argument(flag, help=text, choices=typing.get_args(hint), **options)
        elif typing.get_origin(hint) is list:
            text += f"; write them as 0.7,0.3, and with a leading minus as {flag}=-0.5,1"
            group.add_argument(flag, help=text, type=_numbers, metavar="X,Y", **options)
        else:
            kind = functools.partial(_number_or_auto, hint) if automatic else hint
            group.add_argument(flag, help=text, type=kind, metavar=_METAVARS[hint], **options)
    if cls is ServerConfig:
        group.add_argument("--no-grpc", dest="grpc_port", action="store_const", const=None, default=argparse.SUPPRESS)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The settings of `serve`: defaults, over them the YAML file, over that the flags; raises ConfigError."""
    config: ServerConfig = from_mapping(ServerConfig, read_yaml(args.config)) if args.config else ServerConfig()
    config = dataclasses.replace(config, **_given(args, ServerConfig))
    flags = _given(args, ModelConfig)
    if args.MODEL is not None:
        if config.models:
            raise ConfigError(
                f"MODEL is given as {args.MODEL}, and {args.config} has models too", "name the models in one place"
            )
        config.models = [ModelConfig(model=args.MODEL, **flags)]
    elif len(config.models) == 1:
        config.models = [dataclasses.replace(config.models[0], **flags)]
    elif flags and config.models:
        flag = "--" + next(iter(flags)).replace("_", "-")
        raise ConfigError(
            f"{flag} is given, but {args.config} has several models", "set it in the file, for each model"
        )
    for i, model in enumerate(config.models):
        if not model.model:
            raise ConfigError(f"models[{i}] names no model", "add `model:` with a folder, a hub id or module:function")
        check(model)
    check(config)
    return config


def run_serve(args: argparse.Namespace) -> None:
    """`guerdon serve`: loads the models and serves them until SIGTERM or SIGINT."""
    config = server_config(args)
    _set_up(config.log_level)
    _need("torch", "starlette", "uvicorn")
    _say(f"loading {', '.join(model.model for model in config.models)}" if config.models else "no models")
    from guerdon import assembly
    from guerdon.server import runtime

    runtime.check_addresses(config)  # before models are loaded, which may take minutes
    service = assembly.build_service(config)
    for info in service.models():
        _say(_described(info))

    def on_started(http_url: str, grpc_url: str | None) -> None:
        _say(f"ready at {http_url}" + (f" and {grpc_url}" if grpc_url else "") + "  (Ctrl-C stops it)")

    runtime.run(service, config, on_started=on_started)


def run_score(args: argparse.Namespace) -> int:
    """`guerdon score`: through servers that run, or through one in this process that only it can reach.

    Returns 1 where samples failed.
    """
    from guerdon.client import RewardClient
    from guerdon.client.files import score_file

    flags = _given(args, ModelConfig)
    name = flags.get("name", ModelConfig.name)

    def score(urls: Sequence[str]) -> int:
        with RewardClient(urls, model=name) as client:
            summary = score_file(
                client,
                args.IN,
                args.out,
                template=args.template,
                retry_failed=args.retry_failed,
                progress=not args.no_progress,
            )
        print(summary, file=sys.stderr)
        return 1 if summary.num_failed else 0

    if args.server:
        unused = next((flag for flag in flags if flag != "name"), None)
        if unused is not None:
            raise ConfigError(
                f"--{unused.replace('_', '-')} is given, but the model runs at {args.server[0]}", "leave it out"
            )
        return score(args.server)
    _set_up("warning")
    _need("torch", "starlette", "uvicorn")
    from guerdon import assembly
    from guerdon.server.runtime import RunningServer

    model = ModelConfig(model=args.model, **flags)
    check(model)
    config = ServerConfig(port=0, grpc_port=None, models=[model])
    # Nothing is left to wait for: the rows are all written, or Ctrl-C was pressed.
    with RunningServer(assembly.build_service(config), config, grace_s=0) as server:
        return score([server.http_url])


def run_demo(args: argparse.Namespace) -> None:
    """`guerdon demo`: see guerdon.demo."""
    _need("torch", "starlette", "uvicorn", "matplotlib")
    from guerdon.demo.run import run

    run(Path(args.out), Path(args.data) if args.data else None, args.limit)


_METAVARS = {int: "N", float: "X", str: "TEXT"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends as every start error does: what is wrong, and what to do."""
        sys.exit(_fail(message, f"`{self.prog} --help` lists what can be given", 2))


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


def _given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The flags of `cls` that stood on the command line."""
    names = [field.name for field in dataclasses.fields(cls) if field.metadata["flag"]]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _number_or_auto(kind: type, text: str) -> Any:
    try:
        return None if text == "auto" else kind(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from e


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from e


def _described(info: ModelInfo) -> str:
    path = info.path + (f" ({info.why})" if info.why else "")
    return f"{info.name}: {info.kind}, {info.dtype} on {info.device}, {path}"


def _need(*modules: str) -> None:
    """Raises StartError where the optional parts of the installation are missing, without importing them."""
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        extra = "plot" if missing == ["matplotlib"] else "server"
        raise StartError(f"{', '.join(missing)} is not installed", f"pip install 'guerdon[{extra}]'")


def _set_up(log_level: str) -> None:
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpcore", "urllib3", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # A scorer given as module:function is looked for where the command is run, as `python -m` would.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _say(text: str) -> None:
    print(f"guerdon: {text}", flush=True)


def _fail(what: object, help_text: str | None, status: int) -> int:
    print(f"guerdon: {what}", file=sys.stderr)
    for note in getattr(what, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    if help_text:
        print(f"help: {help_text}", file=sys.stderr)
    return status
