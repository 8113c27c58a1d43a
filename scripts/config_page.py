"""Writes docs/config/ from the dataclasses of the settings; `--check` fails if a page is out of date."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

import generated
from generated import ROOT
from guerdon.settings.actors import DistillRunConfig, PPORunConfig, ReinforceRunConfig
from guerdon.settings.chat_judges import BudgetConfig, ChatJudgeConfig, ParseConfig
from guerdon.settings.config import (
    ComponentConfig,
    CriticConfig,
    EngineConfig,
    JudgeConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
    TeacherConfig,
)
from guerdon.settings.fields import default_of, without_none
from guerdon.settings.sources import CRITIC_PORTS, grouped_fields, nested_fields

FOLDER = ROOT / "docs/config"

MADE = "<!-- Made by scripts/config_page.py from the dataclasses. Change those, and run it again. -->"

INDEX = """\
# Settings

Every setting is a key of a YAML file, and almost every one is also a flag. Flags override the file. A value of a wrong
type or out of its bounds is an error at startup that names the setting. `auto` means that the value is chosen at
startup; an empty default means no value. A boolean flag stands alone or with a value, and has a negative form:
`--fsdp`, `--fsdp true`, `--no-fsdp`.

| page | where its settings are given |
| --- | --- |
| [The server](server.md) | `guerdon serve` and the like: at the top of `--config FILE.yaml`, or as flags |
| [Models](models.md) | each item of `models:` in that file, or flags of `guerdon serve MODEL`, `guerdon score` |
| [Teachers](teachers.md) | items of `models:` with `kind: teacher`, or flags of `guerdon serve-teacher MODEL` |
| [Judges](judges.md) | items of `models:` with `kind: judge`, or flags of `guerdon serve-judge MODEL` |
| [Judges in words](chat_judges.md) | items of `models:` with `kind: chat_judge`, or `judge:` of a component |
| [Sums of rewards](sums.md) | each item of `rewards:` in that file; no flags |
| [The critic](critic.md) | `critic:` in that file, or flags of `guerdon serve-critic MODEL` |
| [The actors](actors.md) | sections of the file of `guerdon reinforce`, `ppo`, `distill`, or flags with their paths |
"""

SERVER = """\
# Settings of a server

At the top of the file that `--config` names, or as flags of `guerdon serve`, `serve-critic`, `serve-teacher` and
`serve-judge`:

```yaml
# server.yaml
port: 5555
max_body_mb: 512
models:
  - {model: ./my-reward-model, max_length: 4096}
```
"""

MODELS = """\
# Settings of a model

In a file, `models:` has one item per model. If there is only one model, flags of `guerdon serve` set the same. `guerdon
score --model` also takes these flags. Without `kind`, an item is a reward model or a function.
"""

TEACHERS = """\
# Settings of a teacher

An item of `models:` with `kind: teacher`, or flags of `guerdon serve-teacher`. [Teachers](../teacher.md) explains them.
"""

JUDGES = """\
# Settings of a judge

An item of `models:` with `kind: judge`, or flags of `guerdon serve-judge`. [Judges](../judge.md) explains them.
"""

CHAT_JUDGES = """\
# Settings of a judge in words

An item of `models:` with `kind: chat_judge`, or a component's `judge:` in a sum; there are no flags.
[Judges in words](../chat_judge.md) explains them.
"""

CRITIC = """\
# Settings of a critic

Under `critic:`, or as flags of `guerdon serve-critic`; [more about some of them](../critic_settings.md). What a critic
has in common with models is under [models](models.md), in the groups of the same names.
"""

SUMS = """\
# Settings of a sum of rewards

Under `rewards:`; there are no flags. [Sums](../rewards.md) explains them.
"""

ACTORS = """\
# Settings of the actors

A setting's path is its key: `rollouts.temperature` is `temperature` under `rollouts:` in the file, and
`--rollouts.temperature 0.9` on the command line. [The actors](../actors.md) explains these settings.
"""

COLUMNS = ("setting", "flag", "type", "default", "what")


def type_text(field: dataclasses.Field[Any], hint: Any) -> str:
    """Returns a setting's type and bounds, in words."""
    hint = without_none(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return "mapping"
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
    """Returns a setting's default as in YAML; empty if there is none."""
    value = default_of(field)
    if field.metadata["auto"]:
        return "`auto`"
    if value is None or value in ("", []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(path: str, field: dataclasses.Field[Any], hint: Any, has_flag: bool = True) -> str:
    """Returns one setting's line of a table."""
    flag = "`--" + path.replace("_", "-") + "`" if has_flag else ""
    what = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
    cells = (f"`{path}`", flag, type_text(field, hint), default_text(field), what)
    return "| " + " | ".join(cells) + " |"


def table(rows: list[str]) -> list[str]:
    """Returns the lines of a table with these rows."""
    return ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *rows]


def by_group(cls: type, *, without: type | None = None) -> Iterator[str]:
    """Yields a heading and a table for each group of the dataclass's settings, except those that `without` has."""
    left_out = {field.name for field in dataclasses.fields(without)} if without else set()
    for title, found in grouped_fields(cls):
        if rows := [row(field.name, field, hint) for field, hint in found if field.name not in left_out]:
            yield f"\n## {title[0].upper()}{title[1:]}"
            yield from table(rows)


def without_flags(cls: type, *names: str) -> Iterator[str]:
    """Yields the table of those settings of the dataclass that have no flag."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls)
    yield from table([row(f.name, f, hints[f.name], False) for f in fields if not names or f.name in names])


def actors() -> Iterator[str]:
    """Yields a heading and a table for each section of the actors' settings."""
    commands = {
        ReinforceRunConfig: "guerdon reinforce", PPORunConfig: "guerdon ppo", DistillRunConfig: "guerdon distill",
    }  # fmt: skip
    seen: dict[str, tuple[str, type, list[str]]] = {}
    for cls, command in commands.items():
        for field in dataclasses.fields(cls):
            hint = typing.get_type_hints(cls)[field.name]
            seen.setdefault(field.name, (field.metadata["help"], hint, []))[2].append(f"`{command}`")
    for name, (help_text, cls, where) in seen.items():
        yield f"\n## `{name}`"
        yield f"\n{', '.join(where)}. {help_text}"
        yield from table([row(*found) for found in nested_fields(cls, f"{name}.")])


def pages() -> dict[str, str]:
    """Returns the text of each page, as Markdown, by its file's name."""
    ports = " and ".join(f"`{name}` {port}" for name, port in CRITIC_PORTS.items())
    texts = {
        "README.md": [INDEX.rstrip()],
        "server.md": [
            SERVER,
            f"`guerdon serve-critic` has the default ports {ports}; `--no-grpc` turns gRPC off.",
            *by_group(ServerConfig),
            "\n## What is served",
            *without_flags(ServerConfig, "models", "rewards", "critic"),
        ],
        "sums.md": [SUMS.rstrip(), *without_flags(RewardConfig), "\n## Components", *without_flags(ComponentConfig)],
        "chat_judges.md": [
            CHAT_JUDGES.rstrip(),
            *without_flags(ChatJudgeConfig),
            "\n## `parse`",
            *without_flags(ParseConfig),
            "\n## `budget`",
            *without_flags(BudgetConfig),
        ],
        "critic.md": [
            CRITIC.rstrip(),
            *without_flags(CriticConfig, "model"),
            *by_group(CriticConfig, without=EngineConfig),
        ],
        "actors.md": [ACTORS.rstrip(), *actors()],
    }
    for name, head, cls in (
        ("models.md", MODELS, ModelConfig),
        ("teachers.md", TEACHERS, TeacherConfig),
        ("judges.md", JUDGES, JudgeConfig),
    ):
        texts[name] = [head.rstrip(), *without_flags(cls, "kind", "model"), *by_group(cls)]
    made = {}
    for name, lines in texts.items():
        title, _, rest = "\n".join(lines).partition("\n\n")
        made[name] = f"{title}\n\n{MADE}\n\n{rest}\n"
    return made


if __name__ == "__main__":
    generated.main(__doc__, FOLDER, pages)
