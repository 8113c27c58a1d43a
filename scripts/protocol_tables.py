"""Writes the tables of tensors in docs/*.md from the rows of wire/schema.py; `--check` fails if one is out of date."""

from __future__ import annotations

import re

import generated
from generated import ROOT
from guerdon.critic_core import Operation, OperationInfo
from guerdon.wire import schema
from guerdon.wire.schema import Field, inputs_of, outputs_of

DOCS = ROOT / "docs"


def _of(field: Field) -> str:
    return f"`{field.name}` {field.datatype} [{field.axes.replace(' ', ',')}]"


def _operations() -> str:
    """Returns a table of a critic's operations with their tensors."""
    lines = ["| model | inputs | outputs |", "| --- | --- | --- |"]
    rows: dict[str, list[str]] = {}
    for operation in Operation:
        info = OperationInfo(f"critic_{operation}", operation, "critic")
        inputs, outputs = ("; ".join(map(_of, found(info).values())) for found in (inputs_of, outputs_of))
        rows.setdefault(f"{inputs} | {outputs}", []).append(f"`{info.name}`")
    lines += [f"| {', '.join(names)} | {tensors} |" for tensors, names in rows.items()]
    return "\n".join(lines) + "\n"


def _is_teachers(field: Field) -> bool:
    return field.has is schema.LOGPROBS.has or field is schema.CHUNKS


TABLES = {
    "inputs": schema.table(field for field in schema.INPUTS if field.axes.startswith("B") and field.is_listed),
    "outputs": schema.table(
        field
        for field in schema.OUTPUTS
        if field.axes.startswith("B") and not _is_teachers(field) and field is not schema.MORE_ATTRIBUTES
    ),
    "teacher": schema.table(filter(_is_teachers, schema.OUTPUTS)),
    "operations": _operations(),
}
"""The tables by name; a page has one between `<!-- tensors: NAME -->` and `<!-- end -->`."""

_PLACE = re.compile(r"(<!-- tensors: (\w+)[^>]*-->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def pages() -> dict[str, str]:
    """Returns the text of each page that has tables, by its name."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    return {
        name: _PLACE.sub(lambda found: found[1] + TABLES[found[2]] + found[3], text)
        for name, text in texts.items()
        if _PLACE.search(text)
    }


if __name__ == "__main__":
    generated.main(__doc__, DOCS, pages)
