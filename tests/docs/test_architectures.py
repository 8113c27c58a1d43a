"""Every architecture of the installed transformers runs by the path that `docs/architectures.md` lists, and exactly."""

import re
import sys

import pytest
from blocks import ROOT

sys.path.append(str(ROOT / "scripts"))
architectures = pytest.importorskip("architectures")
TYPES = sorted({*architectures.model_types("causal"), *architectures.model_types("classifier")})
PARTS = [TYPES[start : start + architectures.TOGETHER] for start in range(0, len(TYPES), architectures.TOGETHER)]


def listed() -> dict[tuple[str, str], str]:
    """The path of each architecture as a language model and as a reward model, as the page has it."""
    paths = {title: path for path, title in architectures.TITLES.items()}
    found, section = {}, ("", "")
    for line in architectures.PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## (.*): \d+ as (language|reward) models", line):
            section = paths[heading[1]], "causal" if heading[2] == "language" else "classifier"
        elif section[1]:  # a reason may quote other words
            names = re.findall(r"`([\w.-]+)`", line.rpartition(" | ")[2] if line.startswith("| ") else line)
            found |= {(name, section[1]): section[0] for name in names if name in TYPES}
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("types", PARTS, ids=lambda types: f"{types[0]}-{types[-1]}")
def test_each_runs_as_the_page_says(types: list[str]) -> None:
    """`make architectures` writes the page anew; the differences in it vary with the processor."""
    tried, page = architectures.in_a_process(types), listed()
    assert {(one.name, one.kind): one.path for one in tried} == {k: path for k, path in page.items() if k[0] in types}
    assert max(one.difference for one in tried if one.path) < 1e-5
