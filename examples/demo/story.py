"""Builds prompts with good and bad answers from the sentences of topics.yaml.

Preferences between answers are those of a person: helpful answers beat brief ones, and both beat off-topic,
repetitive, rude, evasive and unfinished ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

KINDS = ("helpful", "brief", "off_topic", "repetitive", "rude", "evasive")
"""Kinds of answers: the first two are each preferred to all that follow; the last four rank equal."""

NUM_ANSWERS = 7
"""Answers per drawn prompt: one helpful, one brief, five bad ones, of which the last is unfinished."""

SPOKEN = {"helpful": 0.3, "brief": 0.3, "off_topic": 0.05, "repetitive": 0.1, "rude": 0.1, "evasive": 0.1}
"""Weight of each kind of answer in the policy's training text."""


class Story:
    """Draws prompts with good and bad answers."""

    def __init__(self, rng: random.Random) -> None:
        text = yaml.safe_load(Path(__file__).with_name("topics.yaml").read_text(encoding="utf-8"))
        self.rng = rng
        self.topics: dict[str, dict[str, Any]] = text.pop("topics")
        self.common: list[str] = text.pop("common").split()
        for topic in self.topics.values():
            topic["words"] = topic["words"].split()
        self.phrases: dict[str, list[str]] = text

    def by_topic(self) -> list[list[str]]:
        """Returns the sentences and words of each topic."""
        return [topic["ask"] + topic["facts"] + topic["words"] for topic in self.topics.values()]

    def draw(self) -> tuple[str, list[str]]:
        """Draws one question with NUM_ANSWERS answers, good ones first."""
        name = self.rng.choice(list(self.topics))
        other = self.rng.choice([n for n in self.topics if n != name])
        off_topic = [self._helpful(other), self._facts(other, 1, 2)]
        curt = self.rng.choice([self._rude, self._rude, self._evasive])(name)
        good = [self._helpful(name), self._facts(name, 1, 2)]
        answers = [*good, *off_topic, self._repetitive(name), curt, self._unfinished(name)]
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
        if self.rng.random() < 0.4:
            return " ".join([self._facts(name)] * self.rng.randint(2, 3))
        words = self._facts(name).rstrip(".").split() or [name]
        length = self.rng.randint(1, min(5, len(words)))
        start = self.rng.randint(0, len(words) - length)
        joint = self.rng.choice([" ", ", ", ". ", " and "])
        return joint.join([" ".join(words[start : start + length])] * self.rng.randint(4, 4 + 6 // length)) + "."

    def _unfinished(self, name: str) -> str:
        words = self._facts(name, 2, 3).split()
        return " ".join(words[: self.rng.randint(len(words) // 2, len(words) - 1)])

    def _rude(self, name: str) -> str:
        parts = [self._phrase("rude") for _ in range(self.rng.randint(1, 2))]
        if self.rng.random() < 0.4:
            parts.insert(self.rng.randint(0, len(parts)), self._facts(name))
        return " ".join(parts)

    def _evasive(self, _name: str) -> str:
        return self._phrase("evasive")

    def _vary(self, sentence: str, words: list[str]) -> str:
        """Drops, inserts and misspells words, so that the model weighs words and does not memorise sentences."""
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


class PlainStory(Story):
    """Draws unaltered sentences, the training text of the policy; some answers are bad on purpose."""

    def say(self) -> tuple[str, str]:
        """Draws a question and an answer of a kind drawn by SPOKEN."""
        name = self.rng.choice(list(self.topics))
        return self.ask(name), self._answer(self.rng.choices(list(SPOKEN), list(SPOKEN.values()))[0], name)

    def ask(self, name: str | None = None) -> str:
        """Draws a question about `name`, or a random topic: a sentence with inserted words, or keywords alone."""
        name = name or self.rng.choice(list(self.topics))
        topic = self.topics[name]
        if self.rng.random() < 0.5:
            chosen = self.rng.sample(topic["words"], self.rng.randint(2, 5))
            chosen += self.rng.sample(self.common, self.rng.randint(3, 9))
            self.rng.shuffle(chosen)
            return " ".join(chosen)
        words = self.rng.choice(topic["ask"]).split()
        for _ in range(self.rng.randint(0, 3)):
            inserted = self.rng.choice(topic["words"] if self.rng.random() < 0.5 else self.common)
            words.insert(self.rng.randrange(len(words) + 1), inserted)
        return " ".join(words)

    def _answer(self, kind: str, name: str) -> str:
        if kind == "off_topic":
            kind = "helpful"
            name = self.rng.choice([n for n in self.topics if n != name])
        if kind == "brief":
            return self._facts(name)
        answer: str = getattr(self, f"_{kind}")(name)
        return answer

    def _vary(self, sentence: str, _words: list[str]) -> str:
        return sentence
