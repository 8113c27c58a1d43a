"""Makes the checkpoints of a soak, and plain transformers' scores of its samples."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from soak_samples import VARIANTS
from workload import make_tokenizer

NUM_SAMPLES, LEAST_DIFFERENCE = 48, 0.05
_SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = "the reward of a good answer is what is left when one takes away all that nobody had asked for"


def make(folder: Path) -> None:
    """Writes the checkpoints under `folder/repository` and the samples with their scores as `folder/samples.json`.

    Beside the variants there are three that must never serve: `broken`, whose head is NaN, `other`, which has other
    tokens, and `cut`, a part of whose file is missing.
    """
    torch.set_num_threads(1)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(_TEXT.split(), k=draw.randint(2, 60))) for _ in range(4 * NUM_SAMPLES)]
    tokenizer, repository = make_tokenizer(texts), folder / "repository"
    size = len(tokenizer)
    for seed, name in enumerate((*VARIANTS, "broken", "other")):
        model = _random(seed, size + 8 * (name == "other"))
        if name == "broken":
            model.score.weight.data.fill_(float("nan"))
        model.save_pretrained(repository / name)
        tokenizer.save_pretrained(repository / name)
    (repository / "cut").mkdir(exist_ok=True)
    for path in (repository / "a").iterdir():
        shutil.copy(path, repository / "cut")
    weights = repository / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    scored = [(text, *(_score(repository / name, tokenizer, text) for name in VARIANTS)) for text in texts]
    told = [  # which of the two a score is of must be plain
        {"text": text, "tokens": tokenizer(text)["input_ids"], "a": a, "b": b}
        for text, a, b in scored
        if abs(a - b) > LEAST_DIFFERENCE
    ]
    assert len(told) >= NUM_SAMPLES
    (folder / "samples.json").write_text(json.dumps(told[:NUM_SAMPLES]))


def _random(seed: int, vocab_size: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2, **_SHAPE,
        num_labels=1,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.5 if "embed" in name else 0.15)
    return model


_LOADED: dict[Path, Any] = {}


@torch.inference_mode()
def _score(folder: Path, tokenizer: PreTrainedTokenizerFast, text: str) -> float:
    """Scores one sequence by itself, in float32."""
    if folder not in _LOADED:
        _LOADED[folder] = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    return float(_LOADED[folder](input_ids=ids).logits[0, 0])
