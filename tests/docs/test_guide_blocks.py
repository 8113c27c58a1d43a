"""Runs the blocks of the guides and of the installation's page, or finds the reason why one is not run."""

import json
import shutil
from collections.abc import Iterator

import pytest
from blocks import ROOT, Reader, blocks_of
from test_blocks import NOT_RUN, policy, prompts
from test_trainer_blocks import PAGES as TRAINERS

import served
import zoo

ELSEWHERE = ("distill", "first_run", "score")
"""Guides that `test_blocks.py` runs."""

GUIDES = sorted(page.stem for page in (ROOT / "docs/guides").glob("*.md") if page.stem not in ELSEWHERE)
SLOW = ("critic_placement", "ppo", "production", "ranks", "reinforce", "serve", "trainer", "trl", "troubleshooting")
SCORER = "def shortness(texts):\n    return [1 / (1 + len(text)) for text in texts]\n"


def is_served_from_a_hub(command: str) -> None:
    """`guerdon serve ORG/MODEL ...` would download it; `test_docs.py` gives the line to the parser."""
    assert not command.split()[2].startswith(".")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("guides")
    served.reward_model(folder / "my-reward-model")
    zoo.tokenizer(zoo.checkpoint("llama", folder / "my-prm", "tokcls", num_labels=2))
    policy(folder / "my-policy")
    prompts(folder / "prompts.jsonl")
    (folder / "my_scorer.py").write_text(SCORER)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "2+2? ", "responses": ["4<step>", "5<step>"]}) + "\n")
    with Reader(folder, NOT_RUN | {r"guerdon serve [\w-]+/[\w-]+ .*": is_served_from_a_hub}) as reader:
        yield reader


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in GUIDES])
def test_a_guide_does_what_it_says(page: str, reader: Reader) -> None:
    blocks = blocks_of(ROOT / f"docs/guides/{page}.md")
    # Files that a block names further up are there first: settings, and a certificate.
    blocks.sort(key=lambda block: not block.text.startswith(("# server.yaml", "openssl req")))
    shutil.rmtree(reader.folder / "out", ignore_errors=True)
    for block in blocks:
        reader.read(block)


@pytest.mark.slow
def test_the_pages_of_installation_and_models_do_what_they_say(reader: Reader) -> None:
    for page in ("installation", "models"):
        for block in blocks_of(ROOT / f"docs/{page}.md"):
            reader.read(block)


def test_each_block_of_readme_guides_and_trainers_is_read_by_a_test() -> None:
    """Whatever is in these folders is read: a new guide by the test above, a new trainer's page by its own."""
    source = (ROOT / "tests/docs/test_blocks.py").read_text()
    assert all(f"docs/guides/{name}.md" in source for name in ELSEWHERE) and '"README.md"' in source
    found = {page.stem for page in (ROOT / "docs/trainers").glob("*.md") if blocks_of(page)}
    assert found <= {*TRAINERS}
    for page in [*(ROOT / "docs/guides").glob("*.md"), *(ROOT / "docs/trainers").glob("*.md")]:
        for block in blocks_of(page):
            assert not block.why_not or len(block.why_not.split()) >= 3, f"{page.name}, line {block.line}"
