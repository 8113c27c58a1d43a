"""A frozen language model as a judge: answers a rubric's questions by one token each."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable

from guerdon.core import Score, Sequence
from guerdon.distributed.ranks import Ranks
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.text import Steps, TextEncoder
from guerdon.engine.rubric_labels import check_variables, find_label_tokens, render
from guerdon.engine.rubric_trial import Adviser, try_rubric
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError, InvalidRequest, SampleFailed
from guerdon.judge_core import Pair, Rubric, Sample
from guerdon.settings.config import JudgeConfig, TeacherConfig
from guerdon.settings.rubrics import read_rubric
from guerdon.teacher_core import TokenLogprobs

log = logging.getLogger(__name__)


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
        trial = try_rubric(self._text, rubric, self.labels, teacher.score, teacher.info.max_length)
        if trial.is_poor and teacher.ranks.is_leader:
            log.warning("%s with %s: %s", config.name, rubric.path, trial.text)
        self.max_batch_tokens = teacher.max_batch_tokens
        self.info = dataclasses.replace(
            teacher.info,
            kind="judge",
            weights_version=_version(teacher.info.weights_version, rubric, config),
            outputs=("rewards", "attributes"),
            attribute_names=rubric.attribute_names,
            attribute_weights=rubric.attribute_weights,
            takes_messages=True,
            takes_tokens=False,
            takes_prompts=True,
            takes_labels=rubric.needs_reference,
            max_top_k=max(len(self.labels.ids), teacher.info.max_top_k),
            proofs=(*teacher.info.proofs, f"rubric: {trial.text}"),
            hidden_size=0,
            vocabulary="",
            tokenizer="",
        )

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


def _version(weights: str, rubric: Rubric, config: JudgeConfig) -> str:
    """Returns 16 hex digits that change with all that the scores are made of: weights, rubric, verdict and bound."""
    about = {name: value for name, value in dataclasses.asdict(rubric).items() if name != "path"}
    made_of = repr((weights, about, config.verdict, config.max_other_mass))
    return hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()
