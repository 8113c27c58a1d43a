"""Trainers' own code with a served critic, each in its environment, against plain torch.

`make trainers` makes the environments; a trainer without one is left out, and the summary says so.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import served
import zoo
from guerdon.critic_core import TrainRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig
from trainers import environments
from trainers.driving import drive
from training.plain import PlainCritic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEAR: Any = {"rtol": 1e-5, "atol": 1e-5}
LR = 1e-3
PAGES = Path(served.__file__).parents[1] / "docs/trainers"


def make_rows() -> list[dict[str, Any]]:
    """Prompts and responses of several lengths, one with a tool's tokens, and a reward each."""
    random = np.random.default_rng(7)
    rows = []
    for prompt, response in ((9, 7), (3, 12), (14, 1), (6, 5), (11, 9), (2, 3)):
        ids = random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, prompt + response).tolist()
        rows.append({"prompt": ids[:prompt], "response": ids[prompt:], "mask": [1] * response,
                     "reward": round(float(random.standard_normal()), 3),
                     "kl": (0.1 * random.standard_normal(response)).round(3).tolist()})  # fmt: skip
    rows[1]["mask"][3:6] = [0, 0, 0]
    return rows


ROWS = make_rows()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return served.reward_model(tmp_path / "rm")


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A critic whose global batch is that of the rows, and whose steps are seen in every weight."""
    config = CriticConfig(
        model=str(folder), checkpoint_dir=str(tmp_path / "critic"), learning_rate=LR, global_batch_size=len(ROWS),
        deterministic=True,
    )  # fmt: skip
    with served.running(critic=config) as running:
        yield running


def request(rows: list[dict[str, Any]], step: dict[str, Any]) -> TrainRequest:
    """What the critic is to learn of the trainer's returns and values."""
    tokens = [row["prompt"] + row["response"] for row in rows]
    width = max(map(len, tokens))
    made = TrainRequest("", np.zeros((len(rows), width), np.int64), *np.zeros((3, len(rows), width - 1), np.float32))
    for i, row in enumerate(rows):
        made.tokens[i, : len(tokens[i])] = tokens[i]
        start, stop = len(row["prompt"]) - 1, len(tokens[i]) - 1
        made.returns[i, start:stop], made.prev_values[i, start:stop] = step["returns"][i], step["values"][i]
        made.mask[i, start:stop] = row["mask"]
    return made


def check_values(critic: PlainCritic, rows: list[dict[str, Any]], told: list[list[float]]) -> None:
    """Asserts that these are the plain critic's values of the states before each unmasked token of the responses."""
    for row, values in zip(rows, told, strict=True):
        with torch.no_grad():
            expected = critic.values(np.array(row["prompt"] + row["response"])).numpy()
        start, mask = len(row["prompt"]) - 1, np.array(row["mask"], bool)
        np.testing.assert_allclose(np.array(values)[mask], expected[start:-1][mask], **NEAR)


def check_returns(rows: list[dict[str, Any]], step: dict[str, Any]) -> None:
    """Asserts that with gamma and lambda 1 all returns are the reward at the end."""
    for row, returns in zip(rows, step["returns"], strict=True):
        mask = np.array(row["mask"], bool)
        np.testing.assert_allclose(np.array(returns)[mask], row["reward"], **NEAR)


@pytest.mark.parametrize("kind", ["v1", "v0", "0.7.1"])
def test_verl(kind: str, folder: Path, server: RunningServer, tmp_path: Path) -> None:
    page = (PAGES / "verl_critic.md").read_text()
    (command,) = re.findall(r"(?s)```\n(python -m verl[^`]*critic\.server[^`]*)```", page)
    flags = [flag for flag in shlex.split(command.replace("\\\n", "")) if "=" in flag]
    flags = [flag.replace("http://127.0.0.1:5556", server.http_url) for flag in flags]
    flags += ["trainer.save_freq=1", "critic.ppo_epochs=2"]
    trainer = kind if kind.startswith("v") else str(environments.older_of("verl", kind))
    arguments = (trainer, json.dumps(flags), "SAMPLES", str(folder))
    told = drive("verl", "drive_verl_critic.py", *arguments, samples=ROWS, tmp=tmp_path)
    if kind == "v1":
        assert set(told["placed"]) == {"actor_rollout"}
    plain = PlainCritic(folder, lr=LR)
    first, second, third, repeated = told["steps"]
    for rows, step in ((ROWS, first), (ROWS[::-1], second), (ROWS, third)):
        check_values(plain, rows, step["values"])
        check_returns(rows, step)
        losses = [plain.train(request(rows, step), len(rows))[0] for _ in range(2)]
        np.testing.assert_allclose(step["metrics"]["critic/vf_loss"], losses[0][0], **NEAR)
    assert told["resumed_at"] == 3 and repeated == third


def plain_gae(values: np.ndarray, rewards: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Advantages `[R]` of the unmasked tokens, each with the next unmasked one; 0 elsewhere."""
    advantages, value, advantage = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(np.flatnonzero(mask)):
        advantage = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
        advantages[t], value = advantage, values[t]
    return advantages


@pytest.mark.parametrize(
    ("sizes", "kl_coef"), [({"dp": 2}, 0.0), ({"cp": 2, "tp": 2}, 0.2)], ids=["data", "context-and-tensor"]
)
def test_slime(sizes: dict[str, int], kl_coef: float, folder: Path, server: RunningServer, tmp_path: Path) -> None:
    served_by = {"url": server.http_url, "updates": 2, "lam_alpha": 0.5}
    settings = {**sizes, "kl_coef": kl_coef, "gamma": 0.99, "lambd": 0.9, "critic_server": served_by}
    arguments = (str(environments.source_of("slime")), json.dumps(settings), "SAMPLES")
    told = drive("slime", "drive_slime_critic.py", *arguments, samples=ROWS, tmp=tmp_path)
    plain = PlainCritic(folder, lr=LR)
    *steps, repeated = told["steps"]
    assert len(steps) == 3 and repeated == steps[-1]
    for step in steps:
        values = []
        for row, advantages, returns in zip(ROWS, step["advantages"], step["returns"], strict=True):
            mask = np.array(row["mask"])
            with torch.no_grad():
                found = plain.values(np.array(row["prompt"] + row["response"])).numpy()
            found = found[len(row["prompt"]) - 1 : -1]
            rewards = -kl_coef * np.array(row["kl"])
            rewards[np.flatnonzero(mask)[-1]] += row["reward"]
            lam = max(0.0, 1 - 1 / (0.5 * mask.sum()))
            np.testing.assert_allclose(advantages, plain_gae(found, rewards, mask, 0.99, lam), **NEAR)
            expected = mask * (plain_gae(found, rewards, mask, 0.99, 0.9) + found)
            np.testing.assert_allclose(returns, expected, **NEAR)
            values.append(found)
        for _ in range(2):
            plain.train(request(ROWS, {"returns": step["returns"], "values": values}), len(ROWS))


STUBS = ("vllm/__init__", "vllm/inputs", "vllm/utils", "flash_attn/__init__", "flash_attn/bert_padding",
         "flash_attn/utils/__init__", "flash_attn/utils/distributed")  # fmt: skip
"""Modules that OpenRLHF imports names from, and that need a GPU."""
ANY_NAME = """def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
"""


def test_openrlhf(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    for stub in STUBS:
        file = tmp_path / "stubs" / f"{stub}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ANY_NAME)
    page = (PAGES / "openrlhf.md").read_text()
    (command,) = re.findall(r"(?s)```\npython -m guerdon\.adapters\.openrlhf_critic \.\.\.([^`]*)```", page)
    flags = shlex.split(command.replace("\\\n", "").replace("http://127.0.0.1:5556", server.http_url))
    arguments = (json.dumps([*flags, "--train.max_epochs", "2"]), "SAMPLES", str(folder))
    told = drive("openrlhf", "drive_openrlhf_critic.py", *arguments, samples=ROWS, tmp=tmp_path)
    plain = PlainCritic(folder, lr=LR)
    *steps, repeated = told["steps"]
    assert len(steps) == 3
    assert {name: repeated[name] for name in ("values", "returns")} == {
        name: steps[2][name] for name in ("values", "returns")
    }
    for step in steps:
        check_values(plain, ROWS, step["values"])
        check_returns(ROWS, step)
        losses = [plain.train(request(ROWS, step), len(ROWS))[0] for _ in range(2)]
        np.testing.assert_allclose(step["status"]["critic_loss"], losses[0][0], **NEAR)
