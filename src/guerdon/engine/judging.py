"""A frozen language model as a judge: answers a rubric's questions by one token each.

At the start it tries the rubric: how much of the probability its labels have, and what the model would say instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re

import numpy as np

from guerdon.core import Message, Sequence
from guerdon.distributed.ranks import Ranks
from guerdon.engine.checkpoint.language_models import LoadedPolicy, load_policy
from guerdon.engine.checkpoint.text import Steps, TextEncoder
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError, ConfigError, InvalidRequest, SampleFailed
from guerdon.judge_core import SAMPLE_CRITERIA, Criterion, LabelTokens, Pair, Rubric, Sample
from guerdon.settings.config import JudgeConfig, TeacherConfig
from guerdon.settings.rubrics import read_rubric
from guerdon.teacher_core import TokenLogprobs
from guerdon.thinking import answer_of

log = logging.getLogger(__name__)

ENOUGH = 0.5
"""Least probability of the labels that is not warned of."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking off."""
_CHANNEL = "<|channel|>"
"""The token with which gpt-oss begins to think."""

_RESPONSES = ("The capital of France is Paris.", "I think that it is Lyon.")
_SAMPLES = [Sample(text, "What is the capital of France?", "Paris") for text in _RESPONSES]
"""What a rubric is tried on at the start."""


def build_judge(config: JudgeConfig, ranks: Ranks) -> JudgeEngine:
    """Loads the model and the rubric; raises ConfigError if that does not suit the tokenizer, CheckpointError."""
    rubric = read_rubric(config.rubric)  # before the weights, which may take minutes
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(TeacherConfig) if hasattr(config, f.name)}
    teacher = TeacherConfig(**{**shared, "kind": "teacher"})
    return JudgeEngine(load_policy(teacher, ranks=ranks), config, rubric)


class JudgeEngine(TeacherEngine):
    """A teacher that renders and tokenises a rubric's questions, and is asked about their labels.

    A question is the rendered template followed by the first label, so that every sample shows whether the label is a
    separate token there; log-probs are requested for `labels` in that label's place.
    """

    def __init__(self, loaded: LoadedPolicy, config: JudgeConfig, rubric: Rubric) -> None:
        """Collective; tries the rubric, and warns if labels have little of the probability.

        Raises CheckpointError if there is no tokenizer, ConfigError if the rubric does not suit it.
        """
        super().__init__(loaded, reads_last=True)
        if self.encoder is None:
            raise CheckpointError(
                f"{config.model} has no tokenizer, and a judge reads text",
                "put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside its config.json",
            )
        self.text = self.encoder
        """The tokenizer, for requests that bypass the rubric."""
        self.encoder = None  # to a client it reads texts, as a function does
        self.config, self.rubric = config, rubric
        check_variables(self.text, rubric)
        self.labels = find_label_tokens(self.text, rubric, self.info.vocab_size or 0)
        self._adviser = Adviser(self.text, rubric)
        found, is_poor = self._try_rubric()
        if is_poor and self.ranks.is_leader:
            log.warning("%s with %s: %s", config.name, rubric.path, found)
        # Changes with all that the scores are made of.
        about = {name: value for name, value in dataclasses.asdict(rubric).items() if name != "path"}
        made_of = repr((self.info.weights_version, about, config.verdict, config.max_other_mass))
        self.info = dataclasses.replace(
            self.info,
            kind="judge",
            **rubric.facts(),
            weights_version=hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest(),
            max_top_k=max(len(self.labels.ids), self.info.max_top_k),
            proofs=(*self.info.proofs, f"rubric: {found}"),
            hidden_size=0,
            vocabulary="",
            tokenizer="",
        )

    def _try_rubric(self) -> tuple[str, bool]:
        """Collective; asks every criterion about a sample; returns a line about it, and if labels had too little.

        Raises ConfigError if not even that fits into the model's longest sequence.
        """
        text, rubric, labels, max_length = self.text, self.rubric, self.labels, self.info.max_length
        questions = [str(one) for subject in try_subjects(rubric) for one in self.render(subject)]
        rows = [np.asarray(row) for row in text.encode(questions, not text.takes_messages)]
        longest = max(map(len, rows))
        if max_length is not None and longest > max_length:
            raise ConfigError(
                f"{rubric.path}: a question about a short sample has {longest} tokens, and the model takes "
                f"{max_length}",
                "shorten the template, system or criteria, or raise --max-length",
            )
        masses, answers = [], []
        for result in self.score([Sequence(row, ask=labels.query(len(row))) for row in rows]):
            if isinstance(result, SampleFailed) or result.answer is None:
                return f"a sample fails: {result}", True
            answers.append(result.answer)
            masses.append(float(np.exp(labels.read(result.answer)).sum()))
        worst = int(np.argmin(masses))
        has = f"{min(masses):.3g}" if len(masses) == 1 else f"{min(masses):.3g} to {max(masses):.3g}"
        found = f"on a sample, labels have {has} of the probability"
        if rubric.spellings != "exact":
            parts = zip(rubric.labels, np.split(labels.ids, labels.starts[1:]), strict=True)
            shown = (f"{label!r}: {', '.join(map(repr, text.texts_of(ids)))}" for label, ids in parts)
            found = f"spellings of {'; of '.join(shown)}; {found}"
        if masses[worst] >= ENOUGH:
            return found, False
        names = [one.name for subject in try_subjects(rubric) for one in rubric.criteria_of(subject)]
        return f"{found}; for {names[worst]} {self.explain(answers[worst])}", True

    def render(self, subject: Sample | Pair) -> list[str | InvalidRequest]:
        """Returns the question of each criterion, with the first label after it."""
        return render(self.text, self.rubric, subject, self.rubric.labels[0])

    def explain(self, said: TokenLogprobs) -> str:
        """Returns the likeliest tokens of an answer to a question, and what to do if they are no labels."""
        return self._adviser.explain(said)

    def encode_in_steps(self, texts: list[str]) -> Steps:
        """Returns each text's token ids, as `TextEncoder.encode_in_steps`."""
        return self.text.encode_in_steps(texts, not self.text.takes_messages, None, self.info.max_length)


class Adviser:
    """Describes a model's likeliest answers outside the labels, and the remedy."""

    def __init__(self, text: TextEncoder, rubric: Rubric) -> None:
        self._text, self._labels, template = text, rubric.labels, text.chat_template
        prompt = render(text, rubric, try_subjects(rubric)[0])[0]
        self._opens_thinking = isinstance(prompt, str) and answer_of(prompt) is None
        self._switch = next((name for name in _SWITCHES if re.search(rf"\b(if|not|and|or) {name}\b", template)), "")

    def explain(self, said: TokenLogprobs) -> str:
        """Returns the likeliest tokens with their probabilities, and advice."""
        assert said.top_ids is not None and said.top_logprobs is not None
        texts, probabilities = self._text.texts_of(said.top_ids[0]), np.exp(said.top_logprobs[0]).tolist()
        shown = ", ".join(f"{text!r} {share:.2g}" for text, share in zip(texts, probabilities, strict=True))
        return f"the likeliest tokens are {shown}; {self._advise(texts)}"

    def _advise(self, likeliest: list[str]) -> str:
        first, labels = likeliest[0], {plain_spelling(label): label for label in self._labels}
        if self._opens_thinking or answer_of(first) is None or first.strip() == _CHANNEL:
            variable, unless = self._switch or "enable_thinking", "" if self._switch else " if its template has it"
            return (
                f"the model thinks before it answers: set `chat_template_kwargs: {{{variable}: false}}` in the rubric"
                f"{unless}, or use a judge in words"
            )
        spelled = [
            f"{text!r} for {labels[plain_spelling(text)]!r}"
            for text in likeliest
            if plain_spelling(text) in labels and text not in self._labels
        ]
        if spelled:
            return (
                f"the model spells labels otherwise, {', '.join(spelled)}: write them so, or set `spellings: any` in "
                "the rubric"
            )
        if not first.strip():
            return "the model begins with a blank: without a chat template, end the template with it"
        return "let the template ask for a label alone, choose labels that the model says, or take a larger model"


# ------------------------------------------------------------------------------------ questions and labels as tokens


def try_subjects(rubric: Rubric) -> list[Sample | Pair]:
    """Returns what the rubric is tried on at the start; two responses in both orders if it compares."""
    if rubric.compare is not None:
        return [Pair(*_SAMPLES), Pair(*_SAMPLES[::-1])]
    criteria = () if rubric.criteria else (Criterion(SAMPLE_CRITERIA, "Is this true?"),)
    return [dataclasses.replace(_SAMPLES[0], criteria=criteria)]


def render(text: TextEncoder, rubric: Rubric, subject: Sample | Pair, label: str = "") -> list[str | InvalidRequest]:
    """Returns the question of each criterion, by the chat template if there is one, with a label after it."""
    questions = rubric.render(subject)
    if not text.takes_messages:
        before = f"{rubric.system}\n\n" if rubric.system else ""
        return [before + question + label for question in questions]
    system: list[Message] = [{"role": "system", "content": rubric.system}] if rubric.system else []
    conversations = [[*system, {"role": "user", "content": question}] for question in questions]
    rendered = text.render_prompts(conversations, rubric.chat_template_kwargs)
    return [one + label if isinstance(one, str) else one for one in rendered]


def check_variables(text: TextEncoder, rubric: Rubric) -> None:
    """Raises ConfigError if the chat template does not have a variable of the rubric."""
    for name in rubric.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", text.chat_template):
            what = f"the chat template has no {name}" if text.takes_messages else "the checkpoint has no chat template"
            raise ConfigError(
                f"{rubric.path}: chat_template_kwargs has {name}, and {what}", "leave it out, or correct its name"
            )


def find_label_tokens(text: TextEncoder, rubric: Rubric, vocab_size: int) -> LabelTokens:
    """Returns the tokens of the labels, below `vocab_size`.

    Raises ConfigError unless each label is one separate token after every criterion, and changes no token before it.
    """
    ids = _find_ids(text, rubric)
    if rubric.spellings == "exact":
        return LabelTokens(ids, np.arange(len(ids)))
    plain = [plain_spelling(label) for label in rubric.labels]
    if twice := next((label for label, one in zip(rubric.labels, plain, strict=True) if plain.count(one) > 1), None):
        raise ConfigError(
            f"{rubric.path}: the label {twice!r} and another differ only in case or blanks, and spellings is any",
            "leave one of them out, or set `spellings: exact`",
        )
    spelled: dict[str, list[int]] = {one: [int(i)] for one, i in zip(plain, ids, strict=True)}
    for i, token in enumerate(text.all_texts()[:vocab_size]):
        if (found := spelled.get(plain_spelling(token))) is not None and i not in ids:
            found.append(i)
    lengths = [len(found) for found in spelled.values()]
    return LabelTokens(np.concatenate([*spelled.values()]), np.cumsum([0, *lengths[:-1]]))


def plain_spelling(text: str) -> str:
    """Returns the text without case, and without the blanks and line breaks around it."""
    return text.strip(" \t\r\n▁").casefold()


def _find_ids(text: TextEncoder, rubric: Rubric) -> np.ndarray:
    """Returns the token of each label as it is written, int64 `[L]`."""

    def encode(label: str) -> list[np.ndarray]:
        made = []
        for row in render(text, rubric, try_subjects(rubric)[0], label):
            ids = row if isinstance(row, InvalidRequest) else text.encode([row], not text.takes_messages)[0]
            if isinstance(ids, InvalidRequest):
                raise ConfigError(f"{rubric.path}: the tokenizer refuses the template: {ids}", "correct it, or system")
            made.append(ids)
        return made

    names, alone = [one.name for one in rubric.criteria_of(try_subjects(rubric)[0])], encode("")
    found: dict[str, int] = {}
    for label in rubric.labels:
        for name, before, row in zip(names, alone, encode(label), strict=True):
            added = row[len(before) :]
            if len(added) != 1 or not np.array_equal(row[:-1], before):
                what = f"{len(added)} tokens" if np.array_equal(row[: len(before)], before) else "no token of its own"
                raise ConfigError(
                    f"{rubric.path}: after the criterion {name} the label {label!r} is {what}, and must be one",
                    "choose a label that is one token, with a leading space if the template ends with a word, or "
                    "another end of the template",
                )
            if found.setdefault(label, int(added[0])) != added[0]:
                raise ConfigError(
                    f"{rubric.path}: the label {label!r} is another token after the criterion {name}",
                    "end the template with words of its own",
                )
    ids = [*found.values()]
    same = next((label for label, i in found.items() if ids.count(i) > 1), None)
    if same is not None:
        raise ConfigError(
            f"{rubric.path}: the label {same!r} and another are the same token ({found[same]})", "choose others"
        )
    return np.array(ids, np.int64)
