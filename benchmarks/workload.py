"""Makes what is measured on: a random model, a tokenizer, and text in the shape of RLHF scoring."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

DEMO_PROMPTS = Path(__file__).resolve().parents[1] / "examples/demo/heldout.jsonl"
VOCAB_SIZE, MAX_LENGTH = 8192, 2048
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024}
SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49_152,
}  # fmt: skip
SHAPES = {"small": SHAPE, "smollm2": SMOLLM2}
"""Llamas: a small one, and SmolLM2-135M's shape."""
SHARES = {"small": 1, "smollm2": 3}
"""How many times smaller a cell is, since the model takes longer."""


Chat = dict
"""A row of the data: {"prompt", "responses"}."""

FIRST = 3
"""Number of first groups whose length decides how many there are."""
PROMPTS = {"bare": 0, "short": 180, "long": 1_000}
"""By load: before the question stand so many tokens of earlier turns that the prompt has this many, up to 15% more
or less."""
MOST_RESPONSE = 512
"""Default number of tokens after which a response is cut, like a trainer's limit on new tokens."""
FEWEST = 24
"""Tokens below which no turn is worth adding, and no earlier reply is cut."""
GOLDEN = 0.618
"""The fractions of its multiples are spread evenly, and so are the prompts' lengths."""
TOKENS, SEQUENCES = 16_500, 64
"""A cell has about so many tokens, but at least so many sequences, so that sorting and joining have a choice."""


@dataclass(frozen=True)
class Group:
    """A prompt with its responses, each as the whole text and as ids; `first` is the first one's number."""

    texts: list[str]
    rows: list[np.ndarray]
    first: int
    prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens sent."""
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Cell:
    """The groups of one load and one number of responses."""

    load: str
    responses: int
    groups: list[Group] = field(repr=False)

    @property
    def rows(self) -> list[np.ndarray]:
        """The ids of every sequence."""
        return [row for group in self.groups for row in group.rows]


def read_chats(data: Path, seed: int = 0) -> list[Chat]:
    """Returns the rows of a JSONL file, gzipped or not, shuffled."""
    open_file = gzip.open if data.suffix == ".gz" else open
    with open_file(data, "rt", encoding="utf-8") as file:
        chats = [json.loads(line) for line in file]
    random.Random(seed).shuffle(chats)
    return chats


def cut(text: str, tokenizer: PreTrainedTokenizerFast, most: int) -> str:
    """Returns the text's first `most` tokens."""
    ends = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return text if len(ends) <= most else text[: ends[most - 1][1]]


def prompt_of(chats: list[Chat], number: int, tokens: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the question of that number after turns of other chats, about `tokens` in total, more if it is longer.

    Every prompt starts with another turn, so that no two share a prefix.
    """
    question, history = f"Human: {chats[number]['prompt']}\n\nAssistant: ", ""
    wanted = tokens * (0.85 + 0.3 * (number * GOLDEN % 1))
    turn = number + len(chats) // 2
    while (left := int(wanted) - len(tokenizer(history + question)["input_ids"])) > FEWEST:
        earlier = chats[turn % len(chats)]
        asked = f"Human: {earlier['prompt']}\n\nAssistant: "
        room = left - len(tokenizer(asked)["input_ids"])
        reply = cut(earlier["responses"][0], tokenizer, max(FEWEST, min(MOST_RESPONSE, room)))
        history += f"{asked}{reply}\n\n"
        turn += 1
    return history + question


def responses_of(chats: list[Chat], number: int, count: int) -> list[str]:
    """Returns `count` responses to the question of that number: its own, then one of each later chat in turn."""
    found = list(chats[number]["responses"][:count])
    for step in range(count - len(found)):
        lap, place = divmod(step, len(chats) - 1)
        other = chats[(number + 1 + place) % len(chats)]["responses"]
        found.append(other[lap % len(other)])
    return found


def make_cell(
    chats: list[Chat],
    tokenizer: PreTrainedTokenizerFast,
    load: str,
    responses: int,
    most_response: int = MOST_RESPONSE,
    share: int = 1,
) -> Cell:
    """Makes the groups of a cell, at most one per chat; responses are cut at `most_response` tokens.

    The cell is `share` times smaller than by default.
    """

    def group(number: int) -> Group:
        prompt = prompt_of(chats, number, PROMPTS[load], tokenizer)
        texts = [prompt + cut(r, tokenizer, most_response) for r in responses_of(chats, number, responses)]
        rows = [np.array(tokenizer(text)["input_ids"][:MAX_LENGTH], dtype=np.int64) for text in texts]
        return Group(texts, rows, number * responses, len(tokenizer(prompt)["input_ids"]))

    groups = [group(number) for number in range(min(FIRST, len(chats)))]
    mean = sum(g.num_tokens for g in groups) / len(groups)
    count = max(round(TOKENS / share / mean), -(-SEQUENCES // share // responses), 1)
    groups += [group(number) for number in range(len(groups), min(count, len(chats)))]
    return Cell(load, responses, groups[:count])


def read_groups(data: Path, count: int, seed: int = 0) -> list[list[str]]:
    """Returns texts (prompt and response) of `count` random prompts of a JSONL file of {"prompt", "responses"}."""
    chats = read_chats(data, seed)[:count]
    return [[f"Human: {chat['prompt']}\n\nAssistant: {x}" for x in chat["responses"]] for chat in chats]


def make_models(folder: Path, groups: list[list[str]], shape: str = "small") -> Path:
    """Saves a random model of the shape as `folder/model`, with a tokenizer trained on the text itself.

    `folder/model2` is the same with a second label, the first's negative, for servers that refuse one label.
    """
    tokenizer = make_tokenizer([text for group in groups for text in group])
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0, **SHAPES[shape]
    }  # fmt: skip
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
    """Trains a byte-level BPE tokenizer on the text, with `<pad>` 0, `<s>` 1 and `</s>` 2."""
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
