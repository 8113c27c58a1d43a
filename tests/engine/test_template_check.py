"""A chat template that prints more than the conversation is named; the reference is the rendered text of two days."""

import logging
from pathlib import Path

import pytest

import zoo
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer

TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}Today Date: {{ date_string }}\n" + TURNS
)
DATE = "prints the date (strftime_now)"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (TURNS, ""),
        (LLAMA, DATE),
        ("{{ strftime_now('%H:%M:%S') }}" + TURNS, DATE),
        ("{% if messages[0]['role'] == 'system' %}{{ strftime_now('%Y') }}{% endif %}" + TURNS, DATE),
        ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}" + TURNS, f"{DATE} in some conversations"),
        ("{% if add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}" + TURNS, DATE),
        ("{{ ['a', 'b', 'c', 'd'] | random }}" + TURNS, "prints random text"),
        ("{{ lipsum() }}" + TURNS, "prints random text"),
        ("{{ namespace }}" + TURNS, ""),
        ("{{ cycler('a') }}" + TURNS, "prints addresses in memory"),
        ("{{ raise_exception('no') }}", ""),
        ("{% set my_strftime_now = 1 %}" + TURNS, ""),
    ],
)
def test_what_changes_between_two_renderings_is_named(
    template: str, found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zoo.tokenizer(tmp_path, chat_template=template)
    with caplog.at_level(logging.WARNING):
        proof = load_tokenizer(folder).proofs[1]
        load_tokenizer(folder, warns=False)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("guerdon")]
    if not found:
        assert proof == "the chat template prints no date" and not lines
        return
    assert proof == f"the chat template {found}: the same messages score differently another time"
    assert [line.split("; ")[0] for line in lines] == [f"{folder}: the chat template {found}"]
    assert "chat_template.jinja" in lines[0]


def test_without_a_template_nothing_is_said_of_one(tmp_path: Path) -> None:
    assert len(load_tokenizer(zoo.tokenizer(tmp_path, chat_template=None)).proofs) == 1
