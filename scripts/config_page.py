"""Writes docs/config/ from the dataclasses of the settings; `--check` fails if a page is out of date."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import generated
from generated import ROOT
from guerdon.settings.actors import DistillRunConfig, PPORunConfig, ReinforceRunConfig
from guerdon.settings.chat_judges import BudgetConfig, ChatJudgeConfig, ParseConfig
from guerdon.settings.config import (
    AdapterConfig,
    ComponentConfig,
    CriticConfig,
    JudgeConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
    TeacherConfig,
    TokenRewardConfig,
    TurnConfig,
)
from guerdon.settings.fields import default_of, without_none
from guerdon.settings.rubrics import ComparingConfig, CriterionConfig
from guerdon.settings.sources import CRITIC_PORTS, grouped_fields, nested_fields

FOLDER = ROOT / "docs/config"

MADE = "<!-- Made by scripts/config_page.py from the dataclasses. Change those, and run it again. -->"

INDEX = """\
# Settings

Every setting is a key of a YAML file, and unless its page says otherwise also a flag: its name with dashes, so that
`max_length` is `--max-length`. Flags override the file. A wrong type or a value out of bounds is an error at startup.
`auto` is chosen at startup; an empty default means no value. Boolean flags: `--fsdp`, `--fsdp true`, `--no-fsdp`.

| page | place of its settings |
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

Keys at the top of the file of `--config`, or flags of `guerdon serve`, `serve-critic`, `serve-teacher`, `serve-judge`:

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

Items of `models:`, or flags of `guerdon serve MODEL` and `guerdon score --model`. Without `kind`, an item is a reward
model or a function.
"""

REWARD = """
## `reward`

In the file only: [a reward that is read from logits](../card_scores.md).
"""

TURNS = """
## `turns`

In the file only: [messages that follow every conversation](../card_scores.md#conversations).
"""

ADAPTERS = """
## `adapters`

In the file only: [several adapters over this model](../checkpoints.md#several-adapters-over-one-base-model), each
served by its own name.
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

An item of `models:` with `kind: chat_judge`, or a component's `judge:` in a sum; no flags. [Judges in
words](../chat_judge.md) explains them.
"""

CRITIC = """\
# Settings of a critic

Under `critic:`, or flags of `guerdon serve-critic`; [more about adapters and frozen weights](../critic_settings.md).
"""

SUMS = """\
# Settings of a sum of rewards

Under `rewards:`; no flags. [Sums](../rewards.md) explains them.
"""

ACTORS = """\
# Settings of the actors

A setting's path is its key: `rollouts.temperature` is `temperature` under `rollouts:` in the file, and
`--rollouts.temperature 0.9` on the command line. [The actors](../actors.md) explains them.
"""

Setting = tuple[str, dataclasses.Field[Any], Any]
"""Path, field and type."""

COLUMNS = ("setting", "type", "default", "meaning")


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
    text = {bool: "boolean", int: "integer", float: "number", str: "text"}.get(hint, "section")
    least, most, above = field.metadata["least"], field.metadata["most"], field.metadata["above"]
    if least is not None and most is not None:
        return f"{text} {least:g}–{most:.0f}"
    bounds = [(">", above), ("≥", least), ("≤", most)]
    return ", ".join([text, *(f"{sign}{bound:g}" for sign, bound in bounds if bound is not None)])


def default_text(field: dataclasses.Field[Any]) -> str:
    """Returns a setting's default as in YAML; empty if there is none, or if it is a section."""
    value = default_of(field)
    if field.metadata["auto"]:
        return "`auto`"
    if value is None or value in ("", []) or dataclasses.is_dataclass(value):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(path: str, field: dataclasses.Field[Any], hint: Any) -> str:
    """Returns one setting's line of a table."""
    meaning = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
    return "| " + " | ".join((f"`{path}`", type_text(field, hint), default_text(field), meaning)) + " |"


def table(rows: list[str]) -> list[str]:
    """Returns the lines of a table with these rows."""
    return ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *rows]


def by_group(cls: type, shared: type | None = None) -> Iterator[str]:
    """Yields a heading and a table for each group of settings; those of `shared`'s page are only named there."""
    known = {row(*found) for _, group in grouped_fields(shared) for found in named(group)} if shared else set()
    same: list[str] = []
    for title, group in grouped_fields(cls):
        rows = []
        for name, field, hint in named(group):
            if (line := row(name, field, hint)) in known:
                same.append(f"`{name}`")
            else:
                rows.append(line)
        if rows:
            yield f"\n## {title[0].upper()}{title[1:]}"
            yield from table(rows)
    if same:
        yield f"\nAs for [a model](models.md): {', '.join(same)}."


def named(group: Iterable[tuple[dataclasses.Field[Any], Any]]) -> Iterator[Setting]:
    """Yields each setting of a group with its name."""
    yield from ((field.name, field, hint) for field, hint in group)


def in_the_file_only(cls: type, *names: str) -> Iterator[str]:
    """Yields the table of those settings of the dataclass that have no flag."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls)
    yield from table([row(f.name, f, hints[f.name]) for f in fields if not names or f.name in names])


def actors() -> Iterator[str]:
    """Yields a heading and a table for each section of the actors' settings; a setting is explained once."""
    commands = {
        ReinforceRunConfig: "guerdon reinforce", PPORunConfig: "guerdon ppo", DistillRunConfig: "guerdon distill",
    }  # fmt: skip
    seen: dict[str, tuple[str, type, list[str]]] = {}
    for cls, command in commands.items():
        for field in dataclasses.fields(cls):
            hint = typing.get_type_hints(cls)[field.name]
            seen.setdefault(field.name, (field.metadata["help"], hint, []))[2].append(f"`{command}`")
    pages = {
        CriticConfig: "[a critic](critic.md)",
        ServerConfig: "[a server](server.md)",
        ModelConfig: "[a model](models.md)",
    }
    explained = {
        tuple(row(*setting).split(" | ", 1)): place
        for cls, place in pages.items()
        for _, group in grouped_fields(cls)
        for setting in named(group)
    }
    for name, (help_text, cls, where) in seen.items():
        yield f"\n## `{name}`"
        yield f"\n{', '.join(where)}. {help_text}"
        rows: list[str] = []
        same: dict[str, list[str]] = {}
        for path, field, hint in nested_fields(cls, f"{name}."):
            line = row(path, field, hint)
            key = row(path.removeprefix(f"{name}."), field, hint).split(" | ", 1)
            first = explained.setdefault(tuple(key), name)
            if first == name:
                rows.append(line)
            else:
                same.setdefault(first, []).append(f"`{path}`")
        if rows:
            yield from table(rows)
        for first, paths in same.items():
            yield f"\nAs for {first if '[' in first else f'[`{first}`](#{first})'}: {', '.join(paths)}."


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
            *in_the_file_only(ServerConfig, "models", "rewards", "critic"),
        ],
        "sums.md": [
            SUMS.rstrip(),
            *in_the_file_only(RewardConfig),
            "\n## Components",
            *in_the_file_only(ComponentConfig),
        ],
        "chat_judges.md": [
            CHAT_JUDGES.rstrip(),
            *in_the_file_only(ChatJudgeConfig),
            "\n## `parse`",
            *in_the_file_only(ParseConfig),
            "\n## `budget`",
            *in_the_file_only(BudgetConfig),
            "\n## `criteria`",
            *in_the_file_only(CriterionConfig),
            "\n## `compare`",
            *in_the_file_only(ComparingConfig),
        ],
        "critic.md": [
            CRITIC.rstrip(),
            *in_the_file_only(CriticConfig, "model"),
            *by_group(CriticConfig, ModelConfig),
        ],
        "actors.md": [ACTORS.rstrip(), *actors()],
    }
    for name, head, cls in (
        ("models.md", MODELS, ModelConfig),
        ("teachers.md", TEACHERS, TeacherConfig),
        ("judges.md", JUDGES, JudgeConfig),
    ):
        shared = None if cls is ModelConfig else ModelConfig
        texts[name] = [
            head.rstrip(),
            *in_the_file_only(cls, "kind", "model", "reward", "turns", "adapters"),
            *by_group(cls, shared),
        ]
    texts["models.md"] += [REWARD, *in_the_file_only(TokenRewardConfig), TURNS, *in_the_file_only(TurnConfig)]
    texts["models.md"] += [ADAPTERS, *in_the_file_only(AdapterConfig)]
    made = {}
    for name, lines in texts.items():
        title, _, rest = "\n".join(lines).partition("\n\n")
        made[name] = f"{title}\n\n{MADE}\n\n{rest}\n"
    return made


if __name__ == "__main__":
    generated.main(__doc__, FOLDER, pages)
