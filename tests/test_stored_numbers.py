"""Rewards, values, log-probs and losses of fixed models are the stored ones, so that a change of any library shows.

`PYTHONPATH=src:tests python tests/test_stored_numbers.py` writes the file anew, after a change that is meant; what
cannot be computed here, as SmolLM2's without `make real`, stays as it was. The toys' weights and tokens come from a
hash in integers, and from no library's random generator, whose stream may change.
"""

import json
import platform
import sys
import tempfile
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import zoo
from guerdon import LocalRewardModel, LocalTeacher
from guerdon.assembly import build_trainer
from guerdon.critic_core import TrainRequest
from guerdon.settings.config import CriticConfig
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, ppo_loss, reinforce_loss
from tiers import slow_but

FILE = Path(__file__).with_suffix(".json")
SMOLLM2 = Path(__file__).parents[1] / "out/real/smollm2"
TOYS = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral", "bert")
ROUNDING = 2e-5
"""Largest accepted difference, as a share of the largest number: two layers sum some 100 numbers in each of ten
products in float32, whose rounding is 6e-8, and other processors sum in another order. Token ids are compared exactly.
"""
DEEP_ROUNDING = 2e-4
"""The same for the thirty layers of SmolLM2, and after steps of AdamW, which divides by a gradient's own size."""
CHAT = [
    {"role": "user", "content": "Why is the sky blue? Pourquoi ?"},
    {
        "role": "assistant",
        "content": "Air scatters short waves more than long ones: 450 nm four times as much.",
    },
]
VERSIONS = ("torch", "transformers", "tokenizers", "numpy")


def hashed(name: str, count: int) -> np.ndarray:
    """Integers below 2**32 that depend on the name and their place alone, uint32 `[count]`."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def numbers(name: str, *shape: int) -> np.ndarray:
    """Numbers between -1 and 1, float32 `shape`; each is a whole number of 2**-23."""
    return ((hashed(name, int(np.prod(shape))) >> np.uint32(8)).astype(np.float32) * 2.0**-23 - 1).reshape(shape)


def rows() -> list[np.ndarray]:
    """Five sequences, of which the first four share a prompt."""
    made = [
        hashed(f"row {i}", length) % (zoo.VOCAB_SIZE - zoo.FIRST_TOKEN) for i, length in enumerate((30, 1, 9, 24, 47))
    ]
    tokens = [(row + zoo.FIRST_TOKEN).astype(np.int64) for row in made]
    return [tokens[0], *(np.concatenate([tokens[0], row]) for row in tokens[1:4]), tokens[4]]


def toy(name: str, folder: Path, auto: Any) -> Path:
    """Writes a model of the zoo's shape; its matrices are hashes, its vectors a new model's and a little more."""
    model_type, settings = zoo.ARCHITECTURES[name]
    config = AutoConfig.for_model(model_type, **{"num_labels": 1, **settings})
    model = auto.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            more = torch.from_numpy(numbers(f"{name} {key}", *parameter.shape))
            if parameter.dim() < 2:
                parameter.add_(0.1 * more)
            else:
                parameter.copy_((0.9 if "embed" in key or "wte" in key else 0.3) * more)
    model.save_pretrained(folder / name)
    return folder / name


def of_toy(name: str, folder: Path) -> dict[str, np.ndarray]:
    """A toy's rewards, values, and as a decoder its log-probs, each with its name in the file."""
    with LocalRewardModel(toy(name, folder / "rm", AutoModelForSequenceClassification)) as model:
        found = {"rewards": model.score(tokens=rows()).rewards}
    if name in ("llama", "qwen3", "gpt2"):
        with LocalRewardModel(toy(name, folder / "tokens", AutoModelForTokenClassification)) as model:
            values = model.score(tokens=rows()).values
        found["values"] = np.concatenate([one[-3:] for one in values or ()])
    if name not in zoo.ENCODERS:
        with LocalTeacher(toy(name, folder / "lm", AutoModelForCausalLM)) as teacher:
            logprobs = teacher.logprobs(tokens=rows()).logprobs
        found["log-probs"] = np.concatenate([one[-3:] for one in logprobs or ()])
    return {f"{name}: {kind}": one for kind, one in found.items()}


def of_critic(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The losses of a critic's steps on fixed returns, and the last gradient's norm."""
    config = CriticConfig(
        model=str(toy("llama", folder, AutoModelForSequenceClassification)), global_batch_size=2, learning_rate=1e-3
    )
    tokens = [row[:31] for row in rows() if len(row) > 30]
    table = np.stack(tokens)
    shape = (len(table), table.shape[1] - 1)
    mask = np.zeros(shape, np.float32)
    mask[:, 10:] = 1
    targets = {kind: numbers(kind, *shape) for kind in ("returns", "prev_values")}
    trainer = build_trainer(config)
    report = trainer.train(TrainRequest(id="stored", tokens=table, mask=mask, updates=2, **targets))
    return {f"{name}: losses, last gradient norm": np.array([*report.losses, report.grad_norm])}


def of_losses(name: str, _: Path) -> dict[str, np.ndarray]:
    """The policy's losses of fixed log-probs and advantages, each with its gradient's sum."""
    made, shape = [], (4, 12)
    mask = torch.ones(shape)
    mask[1, 7:] = 0
    for mode in ("token-mean", "seq-mean-token-mean"):
        for loss in ("reinforce", "ppo"):
            now, old, advantages = (torch.from_numpy(numbers(kind, *shape)) for kind in ("now", "old", "advantages"))
            now = (now - 1.5).requires_grad_()
            aggregation = Aggregation(mode, GlobalCounts.of(mask))
            if loss == "ppo":
                total, _ = ppo_loss(now, old - 1.5, advantages, mask, aggregation)
            else:
                total, _ = reinforce_loss(now, advantages, mask, aggregation)
            total.backward()  # type: ignore[no-untyped-call]
            assert now.grad is not None
            made += [total.item(), now.grad.abs().sum().item()]
    return {f"{name}: losses": np.array(made)}


def of_smollm2(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The reward of a conversation by a hashed head, its log-probs and its tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(SMOLLM2, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(0.1 * numbers("head", *model.score.weight.shape)))
    model.save_pretrained(folder / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.save_pretrained(folder / "smollm2")
    ids = np.array(tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False))
    with LocalRewardModel(folder / "smollm2") as rm:
        rewards = np.concatenate([rm.score(messages=[CHAT]).rewards, rm.score(tokens=[ids, ids[:20]]).rewards])
    with LocalTeacher(SMOLLM2) as teacher:
        logprobs = teacher.logprobs(tokens=[ids]).logprobs
    assert logprobs is not None
    return {f"{name}: tokens": ids, f"{name}: rewards": rewards, f"{name}: log-probs": logprobs[0]}


Makes = Callable[[str, Path], dict[str, np.ndarray]]
PARTS: dict[str, tuple[Makes, float]] = {
    **dict.fromkeys(TOYS, (of_toy, ROUNDING)),
    "critic": (of_critic, DEEP_ROUNDING),
    "policy": (of_losses, ROUNDING),
    "SmolLM2": (of_smollm2, DEEP_ROUNDING),
}
"""What makes each part of the file, and how far its numbers may be off."""


def versions() -> dict[str, str]:
    """What the numbers may depend on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}}


def compare(found: dict[str, np.ndarray], stored: dict[str, Any], bound: float) -> None:
    """Fails with both sets of versions if a number is off by more than `bound` times the largest of its list."""
    for name, got in found.items():
        want = np.array(stored["numbers"][name])
        assert got.shape == want.shape, f"{name}: {got.shape} numbers, stored are {want.shape}"
        far = np.abs(got - want).max() / max(1, np.abs(want).max())
        assert far <= (0 if got.dtype.kind == "i" else bound), (
            f"{name}: off by {far:.2g}, at most {bound:.2g} is rounding. Stored with {stored['versions']}, here are "
            f"{versions()}. If the change is meant, write them anew as {Path(__file__).name} says"
        )


def test_the_hash_is_fixed() -> None:
    assert hashed("row 0", 3).tolist() == [3774507287, 672749445, 1360024672]


@pytest.mark.parametrize(
    "part", slow_but(("llama", "gpt2", "bert", "critic"), [name for name in PARTS if name != "SmolLM2"])
)
def test_numbers_are_the_stored_ones(part: str, tmp_path: Path) -> None:
    make, bound = PARTS[part]
    compare(make(part, tmp_path), json.loads(FILE.read_text()), bound)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make real gets SmolLM2-135M-Instruct")
def test_smollm2s_numbers_are_the_stored_ones(tmp_path: Path) -> None:
    test_numbers_are_the_stored_ones("SmolLM2", tmp_path)


def test_a_change_beyond_rounding_fails_and_names_the_versions() -> None:
    stored = {"versions": {"torch": "1.0"}, "numbers": {"a": [1.0, -3.0]}}
    compare({"a": np.array([1 + 3e-5, -3.0])}, stored, ROUNDING)
    with pytest.raises(AssertionError, match=r"a: off by 3e-05.*'torch': '1.0'.*'transformers': '\d"):
        compare({"a": np.array([1 + 9e-5, -3.0])}, stored, ROUNDING)


def write() -> None:
    """Writes the file anew."""
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"numbers": {}}
    for part, (make, _) in PARTS.items():
        if part == "SmolLM2" and not SMOLLM2.exists():
            print(f"{part} stays as it was: make real gets it", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name, found in make(part, Path(folder)).items():
                stored["numbers"][name] = [
                    one if isinstance(one, int) else float(f"{one:.9g}") for one in found.tolist()
                ]
    lines = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in stored["numbers"].items()]
    text = f'{{\n "versions": {json.dumps(versions())},\n "numbers": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    FILE.write_text(text)


if __name__ == "__main__":
    write()
