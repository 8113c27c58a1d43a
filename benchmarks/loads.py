"""The loads of bench.py: real chat text in cells of one prompt's length and one number of responses."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from workload import MAX_LENGTH

Chat = dict
"""A row of the data: {"prompt", "responses"}."""

FIRST = 3
"""Groups by whose length their number is chosen."""
PROMPTS = {"bare": 0, "short": 180, "long": 1_000}
"""By load: before the question stand so many tokens of earlier turns that the prompt has this many, up to 15% more
or less."""
MOST_RESPONSE = 512
"""Tokens after which a response is cut unless another limit is given, as a trainer's limit on new tokens does it."""
FEWEST = 24
"""Tokens below which no turn is worth adding, and no earlier reply is cut."""
GOLDEN = 0.618
"""Its multiples' fractions are spread evenly: the prompts' lengths are, too."""
TOKENS, SEQUENCES = 16_500, 64
"""A cell has about so many tokens, but at least so many sequences, so that whoever sorts or joins has a choice."""


@dataclass(frozen=True)
class Group:
    """One prompt with its responses, each as the whole text and as its ids; `first` is the first one's number."""

    texts: list[str]
    rows: list[np.ndarray]
    first: int
    prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are sent."""
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Cell:
    """Groups of one load and one number of responses."""

    load: str
    responses: int
    groups: list[Group] = field(repr=False)

    @property
    def rows(self) -> list[np.ndarray]:
        """The ids of every sequence."""
        return [row for group in self.groups for row in group.rows]


def read_chats(data: Path, seed: int = 0) -> list[Chat]:
    """The rows of a JSONL file, gzipped or not, shuffled."""
    open_file = gzip.open if data.suffix == ".gz" else open
    with open_file(data, "rt", encoding="utf-8") as file:
        chats = [json.loads(line) for line in file]
    random.Random(seed).shuffle(chats)
    return chats


def cut(text: str, tokenizer: PreTrainedTokenizerFast, most: int) -> str:
    """The text's first `most` tokens."""
    ends = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return text if len(ends) <= most else text[: ends[most - 1][1]]


def prompt_of(chats: list[Chat], number: int, tokens: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """The question of that number behind turns of other chats, of about `tokens` together, or more where it is longer.

    The earliest turn of every prompt is another one, so that no two prompts begin alike.
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
    """`count` responses to the question of that number: its own, then, of the chats after it, one of each in turn."""
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
) -> Cell:
    """As many groups as a cell takes, or as there are chats; `most_response` is where responses are cut."""

    def group(number: int) -> Group:
        prompt = prompt_of(chats, number, PROMPTS[load], tokenizer)
        texts = [prompt + cut(r, tokenizer, most_response) for r in responses_of(chats, number, responses)]
        rows = [np.array(tokenizer(text)["input_ids"][:MAX_LENGTH], dtype=np.int64) for text in texts]
        return Group(texts, rows, number * responses, len(tokenizer(prompt)["input_ids"]))

    groups = [group(number) for number in range(min(FIRST, len(chats)))]
    mean = sum(g.num_tokens for g in groups) / len(groups)
    count = max(round(TOKENS / mean), -(-SEQUENCES // responses))
    groups += [group(number) for number in range(len(groups), min(count, len(chats)))]
    return Cell(load, responses, groups[:count])
