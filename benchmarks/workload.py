"""What is measured on: a random model, a tokenizer, and text in the shape of RLHF scoring."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

DEMO_PROMPTS = Path(__file__).resolve().parents[1] / "examples/demo/heldout.jsonl"
VOCAB_SIZE, MAX_LENGTH = 8192, 2048
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024}


def read_groups(data: Path, count: int, seed: int = 0) -> list[list[str]]:
    """Texts (prompt and response) of `count` random prompts of a JSONL file of {"prompt", "responses"}."""
    open_file = gzip.open if data.suffix == ".gz" else open
    with open_file(data, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    random.Random(seed).shuffle(rows)
    return [[f"Human: {r['prompt']}\n\nAssistant: {x}" for x in r["responses"]] for r in rows[:count]]


def make_models(folder: Path, groups: list[list[str]]) -> Path:
    """Saves the random model as `folder/model`, with a tokenizer trained on the text itself.

    `folder/model2` is the same with a second label, the first's negative, for servers that refuse one label.
    """
    tokenizer = make_tokenizer([text for group in groups for text in group])
    torch.manual_seed(0)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0, **SHAPE}
    one = AutoModelForSequenceClassification.from_config(LlamaConfig(**config, num_labels=1))
    two = AutoModelForSequenceClassification.from_config(LlamaConfig(**config, num_labels=2))
    state = dict(one.state_dict())
    state["score.weight"] = torch.cat([state["score.weight"], -state["score.weight"]])
    two.load_state_dict(state)
    for model, name in ((one, "model"), (two, "model2")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        # Some peers need what the newest transformers leaves out or calls by a name that older ones do not know.
        labels = {str(i): f"LABEL_{i}" for i in range(model.config.num_labels)}
        _edit(folder / name / "config.json", id2label=labels)
        _edit(folder / name / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return folder / "model"


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the text, with `<pad>` 0, `<s>` 1 and `</s>` 2."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=MAX_LENGTH
    )


def _edit(path: Path, **settings: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings, indent=1))
