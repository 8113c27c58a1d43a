"""Prompts with good and bad answers, put together from the sentences of topics.yaml.

A preference between two of them has a reason that a person would give: helpful before brief, and both before
off-topic, repetitive, rude and evasive answers.
"""

from __future__ import annotations

import random
from importlib.resources import files
from typing import Any

import yaml

KINDS = ("helpful", "brief", "off_topic", "repetitive", "rude", "evasive")
"""The kinds of answer; each of the first two is preferred to all that follow it, the last four are equals."""

NUM_ANSWERS = 6
"""Answers to each drawn prompt: helpful, brief, and four bad ones."""


class Story:
    """Draws prompts with good and bad answers from the committed sentences."""

    def __init__(self, rng: random.Random) -> None:
        text = yaml.safe_load(files("guerdon.demo").joinpath("topics.yaml").read_text(encoding="utf-8"))
        self.rng = rng
        self.topics: dict[str, dict[str, Any]] = text.pop("topics")
        self.common: list[str] = text.pop("common").split()
        for topic in self.topics.values():
            topic["words"] = topic["words"].split()
        self.phrases: dict[str, list[str]] = text

    def by_topic(self) -> list[list[str]]:
        """For each topic all its sentences and words."""
        return [topic["ask"] + topic["facts"] + topic["words"] for topic in self.topics.values()]

    def draw(self) -> tuple[str, list[str]]:
        """One question with NUM_ANSWERS answers: helpful, brief, and four bad ones."""
        name = self.rng.choice(list(self.topics))
        other = self.rng.choice([n for n in self.topics if n != name])
        off_topic = [self._helpful(other), self._facts(other, 1, 2)]
        curt = self.rng.choice([self._rude, self._rude, self._evasive])(name)
        answers = [self._helpful(name), self._facts(name, 1, 2), *off_topic, self._repetitive(name), curt]
        return self._question(name), answers

    def _question(self, name: str) -> str:
        question = self._vary(self.rng.choice(self.topics[name]["ask"]), self.topics[name]["words"])
        story = " ".join(self.rng.sample(self.common, self.rng.randint(0, 8)))
        return self.rng.choice([f"{story} {question}", f"{question} {story}"]).strip()

    def _facts(self, name: str, least: int = 1, most: int = 1) -> str:
        topic = self.topics[name]
        chosen = self.rng.sample(topic["facts"], self.rng.randint(least, most))
        return " ".join(self._vary(fact, topic["words"]) for fact in chosen)

    def _phrase(self, kind: str) -> str:
        return self._vary(self.rng.choice(self.phrases[kind]), self.common)

    def _helpful(self, name: str) -> str:
        parts = [self._facts(name, 2, 3)]
        if self.rng.random() < 0.4:
            parts.insert(0, self._phrase("openers"))
        if self.rng.random() < 0.2:
            parts.append(self._phrase("closers"))
        return " ".join(parts)

    def _repetitive(self, name: str) -> str:
        words = self._facts(name).rstrip(".").split() or [name]
        length = self.rng.randint(1, min(5, len(words)))
        start = self.rng.randint(0, len(words) - length)
        joint = self.rng.choice([" ", ", ", ". ", " and "])
        return joint.join([" ".join(words[start : start + length])] * self.rng.randint(4, 4 + 6 // length)) + "."

    def _rude(self, name: str) -> str:
        parts = [self._phrase("rude") for _ in range(self.rng.randint(1, 2))]
        if self.rng.random() < 0.4:
            parts.insert(self.rng.randint(0, len(parts)), self._facts(name))
        return " ".join(parts)

    def _evasive(self, _name: str) -> str:
        return self._phrase("evasive")

    def _vary(self, sentence: str, words: list[str]) -> str:
        """The sentence with words left out, strewn in and misspelt, so that words are weighed, not sentences learnt."""
        varied = []
        for word in sentence.split():
            if self.rng.random() < 0.06:
                gap = self.rng.randrange(len(word))
                varied.append(word[:gap] + word[gap + 1 :])
            elif self.rng.random() > 0.15:
                varied.append(word)
            if self.rng.random() < 0.25:
                varied.append(self.rng.choice(self.common))
            if self.rng.random() < 0.12:
                varied.append(self.rng.choice(words))
        return " ".join(varied)
