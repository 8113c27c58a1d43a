"""Teachers: frozen language models that give log-probs of given tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest, Sequence, Truncation, common_prefix
from guerdon.errors import InvalidRequest
from guerdon.kinds.kind import Asks, Kind, Numbers, Rows, SampleReader, Served, Subcommand, Tokenizer
from guerdon.kinds.other_tokenizer import read_as_student, spread
from guerdon.kinds.samples import find_fault, or_nothing
from guerdon.settings.config import TeacherConfig
from guerdon.settings.sources import read_server_settings
from guerdon.teacher_core import MAX_ANSWER_BYTES, LogprobQuery, NextTokenRequest, OwnPrompt
from guerdon.wire.signature import why_no_text

LOGPROB = "log-prob per token"
"""What the page shows over time: the mean over a sample's asked tokens."""
ENTROPY = "entropy per token"
"""The same of the entropies, which clients may ask for."""

_NUM_TRIED = 5
"""So many of the likeliest ids are shown on the page."""

_SHOWN_IDS = 8


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
            prompts = [query.prompt for query in request.asks or ()]
            own = await _own_prompts(reading, served, prompts)
            asked = await read_as_student(reading, served, student, own, request, cut)
        elif request.asks is not None and any(query.prompt is not None for query in request.asks):
            rows, request = await _read_under_own_prompts(reading, served, request)
            asked = await reading.make_sequences(rows, request, cut, served)
        elif request.tokens is None and _is_apart(request):
            rows, lengths = await _read_joined(reading, served, request)
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
        """Returns rows of the student's tokens if it has another tokenizer."""
        return reply if asked.plan is None else spread(asked, reply)

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


# --- prompts before responses --------------------------------------------------------------------------------------


async def _read_joined(reading: SampleReader, served: Served, request: ScoreRequest) -> tuple[Rows, np.ndarray]:
    """Tokenises each prompt and its response together; returns the rows, and the prompts' lengths in tokens.

    A response whose prompt has other tokens without it gets an error. If a conversation does not end with a
    response, its prompt is empty.
    """
    prompts, joined = await reading.join(served, request)
    asked = dataclasses.replace(request, messages=None)
    distinct = list(dict.fromkeys(map(or_nothing, prompts)))
    together = dataclasses.replace(asked, texts=[*map(or_nothing, joined)])
    rows = list(await reading.read_text(served, together, None))
    alone = await reading.read_text(served, dataclasses.replace(asked, texts=distinct), None)
    ids = dict(zip(distinct, alone, strict=True))
    lengths = np.zeros(len(rows), np.int64)
    for i, (row, text, prompt) in enumerate(zip(rows, joined, prompts, strict=True)):
        before = ids[or_nothing(prompt)]
        fault = next((x for x in (prompt, text, before, row) if isinstance(x, InvalidRequest)), None)
        if isinstance(row, np.ndarray) and isinstance(before, np.ndarray):
            lengths[i] = len(before)
            fault = fault or _changed_seam(before, row)
        rows[i] = fault or row
    return rows, lengths


async def _read_under_own_prompts(
    reading: SampleReader, served: Served, request: ScoreRequest
) -> tuple[Rows, ScoreRequest]:
    """Puts the teacher's own prompts before the responses; returns the rows, and the request that they belong to.

    Equal prompts are rendered and tokenised once. A sample without one stays as it is.
    """
    if request.tokens is None or request.asks is None:
        raise InvalidRequest(
            "teacher_prompts go with token ids; of texts and messages, send the teacher's prompt as the prompt"
        )
    texts = await _own_prompts(reading, served, [query.prompt for query in request.asks])
    distinct = list({text: None for text in texts.values() if isinstance(text, str)})
    ids: dict[Any, Any] = {}
    if distinct:
        sent = dataclasses.replace(request, tokens=None, texts=distinct, prompt_lengths=None)
        ids = dict(zip(distinct, await reading.read_text(served, sent, None), strict=True))
    lengths = np.zeros(len(request), np.int64) if request.prompt_lengths is None else request.prompt_lengths.copy()
    rows: list[np.ndarray | InvalidRequest] = [*request.tokens]
    asks = list(request.asks)
    for i, (query, row) in enumerate(zip(request.asks, request.tokens, strict=True)):
        if query.prompt is None:
            continue
        before = ids[text] if isinstance(text := texts[i], str) else text
        length, asks[i] = int(lengths[i]), dataclasses.replace(query, start=None, prompt=None)
        if isinstance(before, InvalidRequest):
            rows[i] = before
        elif not 0 <= length <= len(row):
            rows[i] = InvalidRequest(f"prompt length {length} lies outside the sample's {len(row)} tokens")
        elif not len(before):
            rows[i] = InvalidRequest(
                "the teacher's own prompt has no tokens, and nothing predicts the response's first"
            )
        else:
            rows[i], lengths[i] = np.concatenate([before, row[length:]]), len(before)
    return rows, dataclasses.replace(request, prompt_lengths=lengths, asks=asks)


async def _own_prompts(
    reading: SampleReader, served: Served, prompts: ListLike[OwnPrompt | None]
) -> dict[int, str | np.ndarray | InvalidRequest]:
    """Returns the samples' own prompts by their places: ids as they are, else texts; equal chats are rendered once."""
    found: dict[int, Any] = {i: prompt for i, prompt in enumerate(prompts) if prompt is not None}
    encoder = served.encoder
    if not all(isinstance(prompt, np.ndarray) for prompt in found.values()) and not isinstance(encoder, Tokenizer):
        raise InvalidRequest(why_no_text(served.info))
    chats = {repr(prompt): prompt for prompt in found.values() if isinstance(prompt, list)}
    if chats:
        assert isinstance(encoder, Tokenizer)
        rendered = dict(zip(chats, await reading.run_in_parts([*chats.values()], encoder.render_prompts), strict=True))
        found |= {i: rendered[repr(prompt)] for i, prompt in found.items() if isinstance(prompt, list)}
    return found


def _changed_seam(prompt: np.ndarray, joined: np.ndarray) -> InvalidRequest | None:
    """Returns an error if the prompt's tokens change with the response appended: the boundary would be ambiguous."""
    same = common_prefix(prompt, joined)
    if same == len(prompt):
        return None
    shown = slice(same, same + _SHOWN_IDS)
    return InvalidRequest(
        f"the tokens change where the prompt ends: from token {same} on the prompt alone has {prompt[shown].tolist()}, "
        f"and with the response {joined[shown].tolist()}; send token ids, or split the text elsewhere"
    )


def _is_apart(request: ScoreRequest) -> bool:
    """Whether responses that are text are asked about, whose first token is not known yet."""
    if request.prompt_lengths is not None:
        return False
    if request.texts is not None:
        return request.prompts is not None or request.messages is not None
    return request.messages is not None and any(query.start is None for query in request.asks or ())
