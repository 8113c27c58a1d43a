"""Settings from the command line and the YAML file: every field of a config's dataclass is a flag and a key."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from guerdon.errors import ConfigError
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig, check
from guerdon.settings.fields import from_mapping
from guerdon.settings.yaml_files import read_yaml

CRITIC_PORTS = {"port": 5556, "grpc_port": 5558}
"""Where `serve-critic` listens by default, so that a reward model's server may run beside it."""

_GRPC_ABOVE = 2
"""The gRPC port is so far above the HTTP port if only that is given: servers side by side need one flag each."""

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_settings(parser: argparse.ArgumentParser, *classes: type, defaults: dict[str, Any] | None = None) -> None:
    """One flag for each field of the dataclasses, in one group for each dataclass that they are made of.

    A flag that is not given leaves no trace in the result. `defaults` are those that the help shows in place of the
    fields' own.
    """
    parts = [(cls, cls) for cls in classes] + [(cls, base) for cls in classes for base in cls.__mro__[1:-1]]
    for cls, part in parts:
        hints, own = typing.get_type_hints(cls), _own_names(part)
        fields = [field for field in dataclasses.fields(cls) if field.name in own and field.metadata["flag"]]
        if not fields:
            continue
        about = (part.__doc__ or "").partition("\n")[0]
        group = parser.add_argument_group(part.__name__.removesuffix("Config").lower(), about)
        for field in fields:
            default = (defaults or {}).get(field.name, _default(field))
            _add_flag(group, field.name, field, hints[field.name], default)
        if part is ServerConfig:
            group.add_argument(
                "--no-grpc",
                dest="grpc_port",
                help="HTTP only",
                action="store_const",
                const=None,
                default=argparse.SUPPRESS,
            )


def _own_names(cls: type) -> set[str]:
    """The fields that the dataclass adds to those of its bases."""
    inherited = (
        field.name for base in cls.__bases__ if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)
    )
    return {field.name for field in dataclasses.fields(cls)}.difference(inherited)


def add_sections(parser: argparse.ArgumentParser, cls: type) -> None:
    """One group of flags for each section of the dataclass `cls`; a flag is its setting's path in the YAML file."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        about = field.metadata["help"]
        group = parser.add_argument_group(field.name, f"{about[0].upper()}{about[1:]}.")
        for path, inner, hint in _settings(hints[field.name], f"{field.name}."):
            _add_flag(group, path, inner, hint, _default(inner))


def _settings(cls: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Path, field and type of every setting in a section and the sections within it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _settings(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, hints[field.name]


def _add_flag(
    group: argparse._ArgumentGroup, path: str, field: dataclasses.Field[Any], hint: Any, default: Any
) -> None:
    flag = "--" + path.replace("_", "-")
    text = field.metadata["help"].replace("%", "%%")
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    options: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS}
    if hint is bool:
        group.add_argument(flag, help=text, action=argparse.BooleanOptionalAction, **options)
        return
    is_list, automatic = typing.get_origin(hint) is list, field.metadata["auto"]
    if default not in (None, [], "") or automatic:
        shown = "auto" if automatic else ",".join(map(str, default)) if is_list else default
        text += f" (default: {shown})"
    if typing.get_origin(hint) is Literal:
        group.add_argument(flag, help=text, choices=typing.get_args(hint), **options)
    elif hint == list[str]:
        group.add_argument(flag, help=text + "; repeat it for several", action="append", metavar="TEXT", **options)
    elif is_list:
        if default is None:
            text += f"; write them as 0.7,0.3, and with a leading minus as {flag}=-0.5,1"
        group.add_argument(flag, help=text, type=_numbers, metavar="X,Y", **options)
    else:
        kind = functools.partial(_number_or_auto, hint) if automatic else hint
        group.add_argument(flag, help=text, type=kind, metavar=_METAVARS[hint], **options)


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The flags of `cls` that stood on the command line."""
    names = [field.name for field in dataclasses.fields(cls) if field.metadata["flag"]]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def sectioned_config(args: argparse.Namespace, cls: type) -> Any:
    """The settings of a command with sections: defaults, over them the YAML file CONFIG, over that the flags.

    Raises ConfigError where the file cannot be read or does not fit; what the settings say is not checked.
    """
    config = from_mapping(cls, read_yaml(args.CONFIG))
    for name, value in vars(args).items():
        *sections, last = name.split(".")
        if sections:
            setattr(functools.reduce(getattr, sections, config), last, value)
    return config


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The settings of `serve`: defaults, over them the YAML file, over that the flags; raises ConfigError."""
    config = _server(args, {})
    flags = given(args, ModelConfig)
    if args.MODEL is not None:
        if config.models:
            raise ConfigError(
                f"MODEL is given as {args.MODEL}, and {args.config} has models too", "name the models in one place"
            )
        config.models = [ModelConfig(model=args.MODEL, **flags)]
    elif len(config.models) == 1:
        config.models = [dataclasses.replace(config.models[0], **flags)]
    elif flags and config.models:
        raise ConfigError(
            f"{_flag(flags)} is given, but {args.config} has several models", "set it in the file, for each model"
        )
    elif flags and config.critic is not None:
        raise ConfigError(
            f"{_flag(flags)} is given, but {args.config} has no reward model, only a critic",
            f"guerdon serve-critic --config {args.config} takes flags for the critic",
        )
    return _checked(config)


def critic_server_config(args: argparse.Namespace) -> ServerConfig:
    """The settings of `serve-critic`, as `server_config`; the flags beyond the server's are the critic's."""
    config = _server(args, CRITIC_PORTS)
    flags = given(args, CriticConfig)
    critic = config.critic or CriticConfig()
    if args.MODEL is not None:
        if critic.model and critic.model != args.MODEL:
            raise ConfigError(
                f"MODEL is given as {args.MODEL}, and {args.config} has {critic.model}", "name the model in one place"
            )
        flags["model"] = args.MODEL
    config.critic = dataclasses.replace(critic, **flags)
    if not config.critic.model:
        raise ConfigError(
            "no model to make a critic of",
            "name one: guerdon serve-critic MODEL, or `critic: {model: ...}` in the YAML file",
        )
    return _checked(config)


def _server(args: argparse.Namespace, defaults: dict[str, Any]) -> ServerConfig:
    """The server's settings, with whatever models and critic the YAML file has."""
    settings = read_yaml(args.config) if args.config else {}
    flags = given(args, ServerConfig)
    config = typing.cast(ServerConfig, from_mapping(ServerConfig, settings))
    config = dataclasses.replace(config, **({k: v for k, v in defaults.items() if k not in settings} | flags))
    if "grpc_port" not in {*settings, *flags}:
        config.grpc_port = _grpc_port(config.port)
    return config


def _grpc_port(port: int) -> int:
    """Returns the gRPC port of a server whose HTTP port is `port`; 0, any free one, if that is."""
    if port == 0:
        return 0
    return port + _GRPC_ABOVE if port + _GRPC_ABOVE <= 65_535 else port - _GRPC_ABOVE


def _checked(config: ServerConfig) -> ServerConfig:
    for i, model in enumerate(config.models):
        if not model.model:
            raise ConfigError(f"models[{i}] names no model", "add `model:` with a folder, a hub id or module:function")
    if config.critic is not None and not config.critic.model:
        raise ConfigError("the critic names no model", "add `model:` with a folder or a hub id under `critic:`")
    check(config)
    return config


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flag(flags: dict[str, Any]) -> str:
    return "--" + next(iter(flags)).replace("_", "-")


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
