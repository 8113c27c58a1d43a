"""A frozen language model as a judge: answers a rubric's questions by one token each.

At the start it tries the rubric: how much of the probability its labels have, and what the model would say instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable

import numpy as np

from guerdon.core import Score, Sequence
from guerdon.distributed.ranks import Ranks
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.text import Steps, TextEncoder
from guerdon.engine.rubric_labels import check_variables, find_label_tokens, plain_spelling, render, try_subjects
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError, ConfigError, InvalidRequest, SampleFailed
from guerdon.judge_core import Pair, Rubric, Sample
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


def build_judge(config: JudgeConfig, ranks: Ranks) -> JudgeEngine:
    """Loads the model and the rubric; raises ConfigError if that does not suit the tokenizer, CheckpointError."""
    rubric = read_rubric(config.rubric)  # before the weights, which may take minutes
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(TeacherConfig) if hasattr(config, f.name)}
    teacher = TeacherConfig(**{**shared, "kind": "teacher"})
    return JudgeEngine(TeacherEngine(load_policy(teacher, ranks=ranks), reads_last=True), config, rubric)


class JudgeEngine:
    """Renders and tokenises questions, and scores their labels as a teacher does.

    A question is the rendered template followed by the first label, so that every sample shows whether the label is a
    separate token there; log-probs are requested for `labels` in that label's place.
    """

    takes_all = False
    encoder = None  # to a client it reads texts, as a function does

    def __init__(self, teacher: TeacherEngine, config: JudgeConfig, rubric: Rubric) -> None:
        """Collective; tries the rubric, and warns if labels have little of the probability.

        Raises CheckpointError if there is no tokenizer, ConfigError if the rubric does not suit it.
        """
        if teacher.encoder is None:
            raise CheckpointError(
                f"{config.model} has no tokenizer, and a judge reads text",
                "put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside its config.json",
            )
        self._teacher, self._text = teacher, teacher.encoder
        self.config, self.rubric = config, rubric
        check_variables(self._text, rubric)
        self.labels = find_label_tokens(self._text, rubric, teacher.info.vocab_size or 0)
        self._adviser = Adviser(self._text, rubric)
        found, is_poor = self._try_rubric()
        if is_poor and teacher.ranks.is_leader:
            log.warning("%s with %s: %s", config.name, rubric.path, found)
        self.max_batch_tokens = teacher.max_batch_tokens
        # Changes with all that the scores are made of.
        about = {name: value for name, value in dataclasses.asdict(rubric).items() if name != "path"}
        made_of = repr((teacher.info.weights_version, about, config.verdict, config.max_other_mass))
        self.info = dataclasses.replace(
            teacher.info,
            kind="judge",
            has_components=True,
            weights_version=hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest(),
            outputs=("rewards", "attributes"),
            attribute_names=rubric.attribute_names,
            attribute_weights=rubric.attribute_weights,
            takes_messages=True,
            takes_tokens=False,
            takes_prompts=True,
            takes_labels=rubric.needs_reference,
            max_top_k=max(len(self.labels.ids), teacher.info.max_top_k),
            proofs=(*teacher.info.proofs, f"rubric: {found}"),
            hidden_size=0,
            vocabulary="",
            tokenizer="",
        )

    def _try_rubric(self) -> tuple[str, bool]:
        """Collective; asks every criterion about a sample; returns a line about it, and if labels had too little.

        Raises ConfigError if not even that fits into the model's longest sequence.
        """
        text, rubric, labels, max_length = self._text, self.rubric, self.labels, self._teacher.info.max_length
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
        criterion = rubric.names[worst % len(rubric.criteria)]
        return f"{found}; for {criterion} {self.explain(answers[worst])}", True

    @property
    def text(self) -> TextEncoder:
        """The tokenizer, for requests that bypass the rubric."""
        return self._text

    def watch(self, tick: Callable[..., None]) -> bool:
        """Calls `tick` whenever a layer has run."""
        return self._teacher.watch(tick)

    def check_scores(self) -> None:
        """Collective; raises CheckpointError unless every probe has finite log-probs."""
        self._teacher.check_scores()

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Returns what the sequences' queries ask, in order; equal tokens are computed once."""
        return self._teacher.score(sequences)

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Scores as transformers runs the model, one sequence at a time: the reference for every path."""
        return self._teacher.score_plainly(sequences)

    def leave_path(self, why: str) -> None:
        """Makes every later forward the plain one, as `Forward.leave_path`."""
        self._teacher.leave_path(why)
        self.info = dataclasses.replace(self.info, path=self._teacher.info.path, why=self._teacher.info.why)

    def discard(self) -> None:
        """Frees the weights; nothing can be computed any more."""
        self._teacher.discard()

    def render(self, subject: Sample | Pair) -> list[str | InvalidRequest]:
        """Returns the question of each criterion, with the first label after it."""
        return render(self._text, self.rubric, subject, self.rubric.labels[0])

    def explain(self, said: TokenLogprobs) -> str:
        """Returns the likeliest tokens of an answer to a question, and what to do if they are no labels."""
        return self._adviser.explain(said)

    def encode_in_steps(self, texts: list[str]) -> Steps:
        """Returns each text's token ids, as `TextEncoder.encode_in_steps`."""
        return self._text.encode_in_steps(texts, not self._text.takes_messages, None, self.info.max_length)


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
