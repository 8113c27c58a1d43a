"""Teachers: frozen language models that give log-probs of given tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest, Sequence, Truncation
from guerdon.errors import InvalidRequest
from guerdon.kinds.kind import Asks, Kind, Numbers, Rows, SampleReader, Served, Subcommand, Tokenizer
from guerdon.kinds.other_tokenizer import read_as_student, spread
from guerdon.kinds.samples import find_fault
from guerdon.kinds.teacher_prompts import is_apart, own_prompts, read_joined, read_under_own_prompts
from guerdon.settings.config import TeacherConfig
from guerdon.settings.sources import read_server_settings
from guerdon.teacher_core import MAX_ANSWER_BYTES, LogprobQuery, NextTokenRequest
from guerdon.vocabulary import Decodes
from guerdon.wire.signature import why_no_text

LOGPROB = "log-prob per token"
"""What the page shows over time: the mean over a sample's asked tokens."""
ENTROPY = "entropy per token"
"""The same of the entropies, which clients may ask for."""

_NUM_TRIED = 5
"""So many of the likeliest ids are shown on the page."""


class TeacherKind(Kind):
    """A language model that answers about the tokens of samples, and gives its output head."""

    names = ("teacher",)
    settings = TeacherConfig
    command = Subcommand(
        "serve-teacher",
        "Serve log-probs of a language model, over HTTP and gRPC.",
        "config host port api_keys_file max_top_k dtype device max_length tensor_parallel data_parallel",
        functools.partial(read_server_settings, cls=TeacherConfig),
    )

    def load(self, config: TeacherConfig, ranks: Any) -> Any:
        """Returns the engine over the language model."""
        from guerdon.engine.checkpoint.language_models import load_policy
        from guerdon.engine.teacher import TeacherEngine

        return TeacherEngine(load_policy(config, ranks=ranks.frozen()), student=config.student_tokenizer)

    async def read(self, reading: SampleReader, served: Served, request: ScoreRequest, cut: Truncation | None) -> Asks:
        """Tokenises prompts and responses that are texts together, so that the first asked token is known."""
        _check(served.info, request)
        if isinstance(request, NextTokenRequest):
            return await read_next_tokens(reading, served, served.encoder, request)
        if request.tokens is not None and (student := self.tokenizer(served)) is not served.encoder:
            own = await own_prompts(reading, served, request.asks or ())
            asked = await read_as_student(reading, served, student, own, request, cut)
        elif request.asks is not None and any(query.prompt is not None for query in request.asks):
            rows, request = await read_under_own_prompts(reading, served, request)
            asked = await reading.make_sequences(rows, request, cut, served)
        elif request.tokens is None and is_apart(request):
            rows, lengths = await read_joined(reading, served, request)
            request = dataclasses.replace(request, prompt_lengths=lengths)
            asked = await reading.make_sequences(rows, request, cut, served)
        else:
            asked = await super().read(reading, served, request, cut)
        for i, s in enumerate(asked.sequences):
            others = () if s.ask is None else s.ask.mixture
            for part in others:
                if asked.errors[i] is None and (fault := find_fault(s, part.info)) is not None:
                    asked.errors[i] = InvalidRequest(f"{part.info.name}: {fault}")
        await reading.run_over(len(asked.sequences), functools.partial(size_answers, asked))
        return asked

    def finish(self, asked: Asks, reply: ScoreReply, metrics: Numbers) -> ScoreReply:
        """Returns rows of the student's tokens if it has another tokenizer, and what decodes them."""
        made = reply if asked.plan is None else spread(asked, reply)
        decoder = self.tokenizer(asked.served)
        made.text = decoder if isinstance(decoder, Decodes) else None
        return made

    def tokenizer(self, served: Any) -> Any:
        """Returns the tokenizer of the ids that clients send."""
        return getattr(served, "student", None) or served.encoder

    def histories(self, scores: list[Score]) -> Iterable[tuple[str, str, list[np.ndarray]]]:
        """Yields the log-probs and entropies."""
        said = [score.answer for score in scores if score.answer is not None]
        yield "components", LOGPROB, [one.logprobs for one in said if one.logprobs is not None]
        yield "entropies", ENTROPY, [one.entropy for one in said if one.entropy is not None]

    def try_on_page(self, request: ScoreRequest, info: ModelInfo) -> ScoreRequest:
        """Asks about all tokens."""
        top_k = min(_NUM_TRIED, info.max_top_k, info.vocab_size or 0)
        request.prompts = request.splits = None  # the texts begin with the prompts
        request.asks = [LogprobQuery(start=1, top_k=top_k, with_ranks=True)] * len(request)
        return request


def _check(info: ModelInfo, request: ScoreRequest) -> None:
    """Raises InvalidRequest if a question suits no sample, or the tokens that are asked about are not certain."""
    if request.asks and (fault := request.asks[0].find_fault_of_all(info.vocab_size or 0, info.max_top_k)):
        raise InvalidRequest(fault)
    num_prompts = (request.prompts is not None) + (request.messages is not None)
    has_lengths = request.prompt_lengths is not None
    if (request.prompts is not None and request.texts is None) or (
        request.texts is not None and num_prompts and (num_prompts == 2 or has_lengths)
    ):
        raise InvalidRequest(
            "prompts go with sentences that begin with them, messages with sentences that are responses to them; "
            "both without prompt_lengths"
        )


async def read_next_tokens(reading: SampleReader, served: Served, encoder: Any, request: NextTokenRequest) -> Asks:
    """Returns each sample with what all share, tokenised apart by `encoder`."""
    info = served.info

    async def encode(texts: list[str], is_special: bool) -> ListLike[np.ndarray | InvalidRequest]:
        if not isinstance(encoder, Tokenizer):
            raise InvalidRequest(why_no_text(info))
        steps = encoder.encode_in_steps(texts, is_special, None, info.max_length)
        return await reading.tokenize(steps, info.name)

    shared: np.ndarray | str | InvalidRequest = request.shared
    if isinstance(shared, str):
        (shared,) = await encode([shared], request.shared_special_tokens)
        if isinstance(shared, InvalidRequest):
            raise shared
    rows: Rows = request.tokens or await encode(request.texts or [], bool(request.add_special_tokens))
    sequences: list[Sequence] = []
    errors: list[InvalidRequest | None] = []
    for row in rows:
        ids = row if isinstance(row, np.ndarray) else np.empty(0, np.int64)
        assert isinstance(shared, np.ndarray)
        sequences.append(made := request.sequence(ids, shared))
        fault = row if isinstance(row, InvalidRequest) else None
        if len(made.tokens) == 1:
            fault = InvalidRequest("query and item have no tokens, and nothing predicts a first token; send some")
        errors.append(fault or find_fault(made, info))
    asked = Asks(served, sequences, errors)
    size_answers(asked)
    return asked


def size_answers(asked: Asks) -> None:
    """Notes how large each sequence's answer will be; raises InvalidRequest if they are too large together."""
    info = asked.served.info
    sequences = [s for s in asked.accepted() if s.ask is not None]
    hidden_bytes = info.hidden_size * (4 if info.dtype == "float32" else 2)
    for s in sequences:
        assert s.ask is not None
        num_asked = len(s.tokens) - s.ask.first(s.prompt_length)
        s.ask = s.ask.sized(max(0, num_asked), 2 * info.hidden_size if s.ask.rounds_hidden else hidden_bytes)
    # Tables are as wide as the longest row.
    num_bytes = len(sequences) * max((s.ask.answer_bytes for s in sequences if s.ask is not None), default=0)
    if num_bytes > MAX_ANSWER_BYTES:
        raise InvalidRequest(
            f"the answer would have {num_bytes / (1 << 20):,.0f} MiB, and may have at most "
            f"{MAX_ANSWER_BYTES >> 20:,} MiB: ask about fewer samples, tokens or ids at once"
        )
