"""Runs the blocks of the trainers' pages unchanged; a trainer's own with its Python, if it is installed.

A trainer's own command needs GPUs: it is not run, but its flags and files are looked up in the trainer's sources.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from blocks import ROOT, Block, Reader, blocks_of
from test_blocks import policy, prompts

import served
import zoo
from guerdon.adapters.nemo_aligner import RemoteGPTRMClient, RemoteGPTRMCriticClient
from tiers import slow_but
from trainers import environments

PAGES = sorted(page.stem for page in (ROOT / "docs/trainers").glob("*.md") if page.stem != "README")
QUICK = ("verl",)  # tests/adapters have the others' calls
COMMANDS = {  # a trainer's command, and the files of its sources that have its flags or are named in it
    "miles": (r"(?s)python3 train\.py .*", "miles/**/arguments.py"),
    "nemo_aligner": (r"python -u (examples/\S+) --config-name .*", "examples/nlp/gpt/train_gpt_ppo_actor.py"),
    "nemo_gym": (r"(?s)gym (?:env start|eval run) .*", "nemo_gym/**/*.py"),
    "nemo_rl": (r"uv run (run_grpo\.py) (--config) grpo\.yaml", "examples/run_grpo*.py"),
    "openrlhf": (
        r"(?s)python -m (?:openrlhf\.cli\.train_ppo_ray|guerdon\.adapters\.openrlhf_critic) .*",
        "openrlhf/cli/train_ppo_ray.py",
    ),
    "skyrl": (r"(?s)python -m skyrl\.train\.entrypoints\.main_base .*", "skyrl/train/**/*.py"),
    "slime": (r"(?s)python train\.py .*", "slime/utils/arguments.py"),
    "verl": (
        r"(?s)python -m (?:verl\.trainer\.main_ppo|guerdon\.adapters\.verl_teacher) .*",
        "verl/trainer/config/**/*.yaml",
    ),
}
NEEDS_NO_LIBRARY = (
    "guerdon serve", "curl ", "POST /", "# app.py", "# environment.py", "# gpt_", "# grpo.yaml", "# guerdon.yaml",
    "# my_reward.py", "# my_task.py", "# opd.toml", "# rewards.toml", "# slime.yaml",
)  # fmt: skip
"""How blocks begin that need only guerdon."""

NEEDS_NO_ENVIRONMENT = ("nemo_aligner", "trlx")
"""Pages of which every block runs, or has its reason, without the trainer."""


def sources_of(name: str) -> list[Path]:
    """Returns where a trainer's sources may be: a checkout, or the packages of its environment."""
    return [environments.source_of(name), *environments.python_of(name).parents[1].glob("lib/python*/site-packages")]


def python_of(name: str) -> Path | None:
    """Returns the interpreter that has the trainer; None if there is none."""
    name = name.removesuffix("_critic")  # whose page is about the same trainer
    if name == "servers" or find_spec(name) is not None:
        return Path(sys.executable)
    python = environments.python_of(name)
    return python if environments.stamp_of(name).exists() else None


def looked_up(name: str, pattern: str) -> Callable[[str], None]:
    def check(command: str) -> None:
        files = [file for folder in sources_of(name) for file in folder.glob(pattern)]
        if not files:
            return  # not installed, and the test says so at its end
        text = "".join(file.read_text() for file in files)
        settings = [part.split(".")[-1] for part in re.findall(r" \+?([a-z_.]+)=", command)]
        for flag in [*re.findall(r"--([a-z][\w.-]*)", command), *settings]:
            assert flag in text or flag in ("config-name", "url"), f"{name} has no {flag}"

    return check


NOT_RUN = {pattern: looked_up(name, files) for name, (pattern, files) in COMMANDS.items()}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("pages")
    model = served.reward_model(folder / "my-reward-model")
    policy(folder / "my-policy")
    policy(folder / "my-teacher")
    prompts(folder / "prompts.jsonl")
    with Reader(folder, NOT_RUN) as reader:
        for_an_older_library(model)
        yield reader


def for_an_older_library(model: Path) -> None:
    """Adds what RewardBench's transformers needs in the tokenizer's file, and a pair to compare."""
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": zoo.CHAT_TEMPLATE}
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(named | tokens))
    pair = {
        name: [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "4"), ("rejected", "5"))
    }
    for name in ("pairs.json", "pairs.jsonl"):
        (model.parent / name).write_text(json.dumps(pair))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", slow_but(QUICK, PAGES))
def test_a_trainers_page_does_what_it_says(page: str, reader: Reader) -> None:
    python, left = python_of(page), 0
    source = environments.source_of(page.removesuffix("_critic"))
    reader.use(python or Path("false"), source if source.is_dir() else None)
    for block in blocks_of(ROOT / f"docs/trainers/{page}.md"):
        if python is not None or block.why_not or block.text.startswith(NEEDS_NO_LIBRARY) or "..." in block.text:
            reader.read(block)
        else:
            left += 1
    if page == "nemo_aligner":
        asked_by_nemo_aligners_sections(reader.folder)
    if page == "openrlhf":  # as it calls the function of a file
        ask = "import my_reward; print(my_reward.reward_func(['2+2? 4'], ['2+2?'], ['4'])['rewards'])"
        reader.use(Path(sys.executable))
        reader.read(Block("python", ask, 0))
    if page == "nemo_rl":
        settings = yaml.safe_load((reader.folder / "grpo.yaml").read_text())
        assert settings["data"]["default"]["env_name"] in settings["env"]
    if left or not (python or page in NEEDS_NO_ENVIRONMENT):
        pytest.skip(f"{page} is not installed: {left} of its page's blocks are left out (`make trainers`)")


def asked_by_nemo_aligners_sections(folder: Path) -> None:
    """Checks that the servers in the page's YAML files answer."""
    rows = {"response_tokens": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]), "response_lengths": torch.tensor([4, 3])}
    sections = {name: yaml.safe_load((folder / f"gpt_{name}_actor.yaml").read_text()) for name in ("reinforce", "ppo")}
    reward = RemoteGPTRMClient(sections["reinforce"]["remote_rm"])
    critic = RemoteGPTRMCriticClient(sections["ppo"]["remote_critic_rm"])
    assert np.isfinite(reward.infer_rm(rows).result()).all()
    assert all(np.isfinite(part).all() for part in critic.infer_rm_critic(rows).result())
    reward.close()
    critic.close()
