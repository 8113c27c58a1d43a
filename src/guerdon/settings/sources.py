"""Where settings come from: a YAML file, and over it the command's flags, one for each field of the dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from guerdon.errors import ConfigError
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.settings.config import (
    CriticConfig,
    JudgeConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TeacherConfig,
)
from guerdon.settings.fields import check_settings, default_of, from_mapping, without_none
from guerdon.settings.yaml_files import read_yaml

CRITIC_PORTS = {"port": 5556, "grpc_port": 5558}
"""Default ports of `serve-critic`, so that it can run beside a reward model's server."""

_COMMANDS = {ModelConfig: "guerdon serve", TeacherConfig: "guerdon serve-teacher", JudgeConfig: "guerdon serve-judge"}
"""The command whose flags are the settings of such a model."""

_GRPC_OFFSET = 2
"""The gRPC port is the HTTP port plus this if only the HTTP port is given, so one flag moves both."""

SHORT_SECTION = "parallel"
"""The section of an actor's settings whose flags servers have too, so that they also work without its name."""

GROUPS = {
    "addresses": "host port grpc_port allowed_hosts",
    "authentication and TLS": "api_keys_file allow_anonymous tls_cert tls_key tls_client_ca",
    "model": """name revision base max_length truncation pooling attribute_weights merge_attributes mean std
        step_separator step_reduction chat_template system generation_prompt max_top_k student_tokenizer rubric verdict
        max_other_mass model_repository weight_transfer while_asleep""",
    "isolated functions": """isolate isolate_python children sample_deadline_s sample_cpu_s sample_memory_mb
        sample_processes import_deadline_s pass_env""",
    "training": """global_batch_size learning_rate weight_decay betas optimizer lr_schedule warmup_steps total_steps
        gradient_clip_val loss_clip_val trainable frozen lora lora_alpha lora_targets activation_checkpointing""",
    "checkpoints": "checkpoint_dir keep_checkpoints keep_best keep_best_mode save_every",
    "reward model beside the critic": """reward_model reward_model_memory reward_revision reward_pooling
        reward_attribute_weights reward_mean reward_std""",
    "batching and queue": "max_batch_tokens max_queue_tokens max_queue_sequences",
    "precision and devices": "dtype dequantize device deterministic require_packed recheck_share",
    "multi-process": "tensor_parallel data_parallel fsdp rank_timeout_s max_restarts",
    "request limits": "max_body_mb max_bodies_mb max_requests max_request_sequences max_connections",
    "groups of single calls": "group_size group_wait_s group_incomplete",
    "timeouts": """request_timeout_s shutdown_timeout_s header_timeout_s read_timeout_s write_timeout_s
        idle_timeout_s""",
    "page, logs and traces": "dashboard dashboard_samples log_level log_format traces",
}
"""The groups of a server's settings in `--help-all` and docs/config/, each with its settings in order."""


def grouped_fields(*classes: type) -> Iterator[tuple[str, list[tuple[dataclasses.Field[Any], Any]]]]:
    """Yields each group that the dataclasses have settings of, with their fields and types."""
    fields: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)  # slow: once per class
        own = (field for field in dataclasses.fields(cls) if field.metadata["flag"])
        fields |= {field.name: (field, hints[field.name]) for field in own}
    for title, names in GROUPS.items():
        if found := [fields.pop(name) for name in names.split() if name in fields]:
            yield title, found
    assert not fields, f"in no group: {', '.join(fields)}"


def nested_fields(cls: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yields path, field and type of every setting in a section and in the sections within it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from nested_fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, hints[field.name]


def add_server_flags(parser: argparse.ArgumentParser, *classes: type, defaults: Mapping[str, Any] = {}) -> None:
    """Adds one flag for each setting of the dataclasses, by group; a flag that is not given sets nothing.

    The help shows `defaults` in place of the fields' own.
    """
    for title, found in grouped_fields(*classes):
        group = parser.add_argument_group(title)
        for field, hint in found:
            _add_flag(group, field.name, field, hint, defaults.get(field.name, default_of(field)))
            if field.name == "grpc_port":
                group.add_argument(
                    "--no-grpc",
                    dest=field.name,
                    help="Serve HTTP only.",
                    action="store_const",
                    const=None,
                    default=argparse.SUPPRESS,
                )


def add_section_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Adds one group of flags for each section of the dataclass `cls`; a flag is its setting's path in the YAML."""
    hints = typing.get_type_hints(cls)
    for section in dataclasses.fields(cls):
        group = parser.add_argument_group(section.name, section.metadata["help"])
        for path, field, hint in nested_fields(hints[section.name], f"{section.name}."):
            _add_flag(group, path, field, hint, default_of(field), has_short=section.name == SHORT_SECTION)


def _add_flag(
    group: argparse._ArgumentGroup,
    path: str,
    field: dataclasses.Field[Any],
    hint: Any,
    default: Any,
    has_short: bool = False,
) -> None:
    flag, hint = "--" + path.replace("_", "-"), without_none(hint)
    names = [flag, "--" + field.name.replace("_", "-")] if has_short else [flag]
    text = field.metadata["help"].replace("%", "%%")
    options: dict[str, Any] = {"dest": path, "default": argparse.SUPPRESS}
    is_list, is_auto = typing.get_origin(hint) is list, field.metadata["auto"]
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is Literal:
        options["choices"] = typing.get_args(hint)
    elif hint == list[str]:
        options |= {"action": "append", "metavar": "TEXT"}
        text += " Repeat it for several."
    elif is_list:
        options |= {"type": _parse_numbers, "metavar": "X,Y"}
        if default is None:
            text += f" Write 0.7,0.3, and with a leading minus {flag}=-0.5,1."
    else:
        options["type"] = functools.partial(_parse_number_or_auto, hint) if is_auto else hint
        options["metavar"] = {int: "N", float: "X", str: "TEXT"}[hint]
    if hint is not bool and (default not in (None, [], "") or is_auto):
        text += f" (default: {'auto' if is_auto else ','.join(map(str, default)) if is_list else default})"
    group.add_argument(*names, help=text, **options)


def _parse_number_or_auto(kind: type, text: str) -> Any:
    try:
        return None if text == "auto" else kind(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from e


def _parse_numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from e


def given_flags(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the settings of `cls` that the command line gives."""
    names = [field.name for field in dataclasses.fields(cls) if field.metadata["flag"]]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def read_actor_settings(args: argparse.Namespace, cls: type) -> Any:
    """Returns an actor's settings: defaults, overridden by the YAML file CONFIG, then by flags.

    Raises ConfigError if the file cannot be read or does not fit; `check_actor` checks the values.
    """
    config = from_mapping(cls, read_yaml(args.CONFIG))
    for path, value in vars(args).items():
        *sections, name = path.split(".")
        if sections:
            setattr(functools.reduce(getattr, sections, config), name, value)
    return config


def read_server_settings(args: argparse.Namespace, cls: type[ServedModelConfig] = ModelConfig) -> ServerConfig:
    """Returns the settings of `serve`: defaults, overridden by the YAML file, then by flags, those of a model of `cls`.

    Raises ConfigError.
    """
    config = _read_server(args, {})
    flags = given_flags(args, cls)
    flag = f"--{next(iter(flags), '').replace('_', '-')}"
    if args.MODEL is not None:
        if config.models:
            problem = f"MODEL is given as {args.MODEL}, and {args.config} has models too"
            raise ConfigError(problem, "name the models in one place")
        config.models = [cls(model=args.MODEL, **flags)]
    elif len(config.models) == 1:
        only = config.models[0]
        if flags and not isinstance(only, cls):
            command = f", or use {_COMMANDS[type(only)]} --config {args.config}" if type(only) in _COMMANDS else ""
            problem = f"{flag} is given, but the model of {args.config} is a {only.kind}"
            raise ConfigError(problem, f"set it in the file{command}")
        config.models = [dataclasses.replace(only, **flags)]
    elif flags and config.models:
        problem = f"{flag} is given, but {args.config} has several models"
        raise ConfigError(problem, "set it in the file, for each model")
    elif flags and config.critic is not None:
        problem = f"{flag} is given, but {args.config} has no reward model, only a critic"
        raise ConfigError(problem, f"guerdon serve-critic --config {args.config} takes flags for the critic")
    return _check_models(config)


def read_critic_settings(args: argparse.Namespace) -> ServerConfig:
    """Returns the settings of `serve-critic`, as `read_server_settings`; its other flags are the critic's."""
    config = _read_server(args, CRITIC_PORTS)
    critic = config.critic or CriticConfig()
    model = args.MODEL or critic.model
    if critic.model not in ("", model):
        problem = f"MODEL is given as {args.MODEL}, and {args.config} has {critic.model}"
        raise ConfigError(problem, "name the model in one place")
    if not model:
        remedy = "name one: guerdon serve-critic MODEL, or `critic: {model: ...}` in the YAML file"
        raise ConfigError("no model to make a critic of", remedy)
    config.critic = dataclasses.replace(critic, model=model, **given_flags(args, CriticConfig))
    return _check_models(config)


def _read_server(args: argparse.Namespace, defaults: dict[str, Any]) -> ServerConfig:
    settings = read_yaml(args.config) if args.config else {}
    flags = given_flags(args, ServerConfig)
    config = typing.cast(ServerConfig, from_mapping(ServerConfig, settings))
    config = dataclasses.replace(config, **({k: v for k, v in defaults.items() if k not in settings} | flags))
    if "grpc_port" not in {*settings, *flags}:
        beside = config.port + _GRPC_OFFSET if config.port + _GRPC_OFFSET <= 65_535 else config.port - _GRPC_OFFSET
        config.grpc_port = beside if config.port else 0  # any free port, as for HTTP
    return config


def _check_models(config: ServerConfig) -> ServerConfig:
    for i, model in enumerate(config.models):
        if not model.model:
            is_chat = isinstance(model, ChatJudgeConfig)
            remedy = "the model's name at the url" if is_chat else "a folder, a hub id or module:function"
            raise ConfigError(f"models[{i}] names no model", f"add `model:` with {remedy}")
    if config.critic is not None and not config.critic.model:
        raise ConfigError("the critic names no model", "add `model:` with a folder or a hub id under `critic:`")
    check_settings(config)
    return config
