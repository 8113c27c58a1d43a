"""Writes docs/config.md from the dataclasses that the settings are; `--check` says whether it is out of date."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import generated
from generated import ROOT
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig
from guerdon.settings.config import ComponentConfig, CriticConfig, ModelConfig, RewardConfig, ServerConfig
from guerdon.settings.flags import CRITIC_PORTS

PAGE = ROOT / "docs/config.md"

HEAD = """\
# Settings

<!-- Made by scripts/config_page.py from the dataclasses. Change those, and run it again. -->

Every setting is a key of a YAML file, and nearly every one a flag; a flag overrides the file. A value that is not of
its type, or out of its bounds, is an error at the start that names the setting. `auto` stands for a value that is found
out at start, and an empty default for none. A flag whose setting is `true` or `false` takes that word, or none for
`true`, and has a second form that turns it off: `--fsdp`, `--fsdp true`, `--no-fsdp`.

| section | is given to |
| --- | --- |
| [The server](#the-server) | `guerdon serve`, `guerdon serve-critic`: at the top of `--config FILE.yaml`, or as flags |
| [Models](#models) | each item of `models:` in that file, or flags of `guerdon serve MODEL` |
| [Sums of rewards](#sums-of-rewards) | each item of `rewards:` in that file; see [rewards.md](rewards.md) |
| [The critic](#the-critic) | `critic:` in that file, or flags of `guerdon serve-critic MODEL` |
| [The actors](#the-actors) | sections of the file of `guerdon reinforce` and `guerdon ppo`, or flags of their paths |
"""

SERVER = """
## The server

As in `guerdon serve --config server.yaml`:

```yaml
port: 5555
max_body_mb: 512
models:
  - {model: ./my-reward-model, max_length: 4096}
```
"""

MODELS = """
## Models

A file's `models:` has one item for each; with one model, flags set the same. `guerdon score --model` takes these flags,
too.
"""

CRITIC = """
## The critic

Under `critic:`, or as flags of `guerdon serve-critic`. It has also all settings of
[how a checkpoint is served](#how-a-checkpoint-is-served-whether-it-scores-or-learns) and
[how it is loaded](#how-a-checkpoint-is-loaded-and-its-forward-run). [critic.md](critic.md) says what they mean.
"""

SUMS = """
## Sums of rewards

Under `rewards:`; there are no flags.
"""

ACTORS = """
## The actors

A setting's path is its key: `rollouts.temperature` is `temperature` under `rollouts:`, and
`--rollouts.temperature 0.9` on the command line. [actors.md](actors.md) says what they mean.
"""

COLUMNS = ("setting", "flag", "type", "default", "what")


def fields_of(cls: type) -> Iterator[tuple[type, list[dataclasses.Field[Any]]]]:
    """The dataclass and its bases, each with the fields that stand in it and in none before it."""
    told: set[str] = set()
    by_name = {field.name: field for field in dataclasses.fields(cls)}
    for base in cls.__mro__:
        own = [name for name in inspect.get_annotations(base) if name in by_name and name not in told]
        told.update(own)
        if own:
            yield base, [by_name[name] for name in own]


def type_text(field: dataclasses.Field[Any], hint: Any) -> str:
    """A setting's type and its bounds, in words."""
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        inner = typing.get_args(hint)[0]
        return {float: "numbers", str: "texts"}.get(inner, "list")
    text = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}.get(hint, "section")
    least, most, above = field.metadata["least"], field.metadata["most"], field.metadata["above"]
    if least is not None and most is not None:
        return f"{text}, {least:g} to {most:.0f}"
    bounds = [("above", above), ("at least", least), ("at most", most)]
    return ", ".join([text, *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)])


def default_text(field: dataclasses.Field[Any]) -> str:
    """A setting's default as YAML has it; empty where there is none."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if field.metadata["auto"]:
        return "`auto`"
    if value is None or value in ("", []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(path: str, field: dataclasses.Field[Any], hint: Any, has_flag: bool) -> str:
    """One setting's line of a table."""
    flag = "`--" + path.replace("_", "-") + "`" if has_flag else ""
    what = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
    cells = (f"`{path}`", flag, type_text(field, hint), default_text(field), what)
    return "| " + " | ".join(cells) + " |"


def table(rows: list[str]) -> list[str]:
    """The lines of a table of these rows."""
    return ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *rows]


def by_class(cls: type, *, without: type | None = None, flags: bool = True) -> Iterator[str]:
    """A heading and a table for the dataclass and each of its bases, but those that `without` has, too."""
    hints = typing.get_type_hints(cls)
    for base, fields in fields_of(cls):
        if without is None or not issubclass(without, base):
            yield f"\n### {(base.__doc__ or base.__name__).splitlines()[0].rstrip('.')}"
            yield from table([row(f.name, f, hints[f.name], flags and f.metadata["flag"]) for f in fields])


def of_section(cls: type, prefix: str) -> Iterator[str]:
    """The rows of an actor's section and the sections within it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from of_section(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield row(prefix + field.name, field, hints[field.name], True)


def actors() -> Iterator[str]:
    """A heading and a table for each section of the two actors' settings."""
    commands = {ReinforceRunConfig: "guerdon reinforce", PPORunConfig: "guerdon ppo"}
    seen: dict[str, tuple[dataclasses.Field[Any], type, list[str]]] = {}
    for cls, command in commands.items():
        for field in dataclasses.fields(cls):
            hint = typing.get_type_hints(cls)[field.name]
            seen.setdefault(field.name, (field, hint, []))[2].append(f"`{command}`")
    for name, (field, cls, told) in seen.items():
        yield f"\n### `{name}`: {field.metadata['help']}"
        yield f"\n{' and '.join(told)}. {(cls.__doc__ or '').splitlines()[0]}"
        yield from table(list(of_section(cls, f"{name}.")))


def page() -> str:
    """The whole page, as Markdown."""
    ports = " and ".join(f"`{name}` {port}" for name, port in CRITIC_PORTS.items())
    lines = [
        HEAD + SERVER,
        f"`guerdon serve-critic` has other defaults for {ports}; `--no-grpc` turns gRPC off.",
        *by_class(ServerConfig),
        MODELS.rstrip(),
        *by_class(ModelConfig),
        SUMS.rstrip(),
        *by_class(RewardConfig, flags=False),
        *by_class(ComponentConfig, flags=False),
        CRITIC.rstrip(),
        *by_class(CriticConfig, without=ModelConfig),
        ACTORS.rstrip(),
        *actors(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    generated.main(__doc__, PAGE, page)
