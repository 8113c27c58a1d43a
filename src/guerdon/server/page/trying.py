"""Try it: scores a prompt and responses from the page like any request, with values per token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest, Sequence, common_prefix
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.kinds import all_kinds
from guerdon.kinds.kind import Tokenizer
from guerdon.messages import plain
from guerdon.teacher_core import TokenLogprobs
from guerdon.wire import bodies, schema
from guerdon.wire.forms.form import check_conversation, of_conversation, pair_samples, to_texts
from guerdon.wire.forms.labels import attributes_of, number
from guerdon.wire.forms.page_bodies import TrialBody, TrialReply, TrialResult, TrialToken

MOST_TOKENS = 32_768
"""Limit of all samples together for values per token."""

_MOST_CHARACTERS = 4 * MOST_TOKENS


@dataclass(frozen=True, eq=False)
class Trial:
    """The samples to score; `prompts` has each sample's context, as text, messages or ids."""

    model: str
    request: ScoreRequest
    prompts: list[Any]

    @property
    def num_characters(self) -> int:
        """Of all samples together, each with its prompt."""
        if self.request.texts is not None:
            return sum(map(len, self.request.texts))
        conversations = self.request.messages or []
        return sum(len(message["content"]) for conversation in conversations for message in _plain(conversation))

    def ask(self, info: ModelInfo) -> ScoreRequest:
        """Returns the request, as the model's kind has samples tried."""
        return all_kinds.of(info).try_on_page(self.request, info)

    def length(self, i: int) -> int:
        """About how many tokens the sample has before a function that reads it as text."""
        request = self.request
        if request.tokens is not None:
            return len(request.tokens[i])
        text = request.texts[i] if request.texts is not None else _plain((request.messages or [])[i])[-1]["content"]
        return Sequence(np.empty(0, np.int64), text).num_tokens

    def ids(self, tokenizer: Tokenizer | None, info: ModelInfo) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Returns each sample's tokens and its prompt's, int64 `[T]`; both empty if one cannot be read."""
        nothing = np.empty(0, np.int64)
        request = self.request
        if request.tokens is not None:
            return list(zip(request.tokens, self.prompts, strict=True))
        if tokenizer is None:
            return [None] * len(request)
        if request.splits is not None:
            assert request.texts is not None
            pairs = [(prompt, text[len(prompt) :]) for prompt, text in zip(self.prompts, request.texts, strict=True)]
            pairs += [(prompt, "") for prompt in self.prompts]
            made = tokenizer.encode_pairs(pairs, info.reads_pairs)
            ids = [nothing if isinstance(pair, InvalidRequest) else pair.tokens for pair in made]
            return list(zip(ids[: len(request)], ids[len(request) :], strict=True))
        if request.messages is not None:
            rows = tokenizer.encode_messages(request.messages)
            texts = [text if isinstance(text, str) else "" for text in tokenizer.render_prompts(self.prompts)]
        else:
            assert request.texts is not None
            adds = [info.reads_pairs and not tokenizer.has_special_tokens(text) for text in request.texts]
            rows = [tokenizer.encode([text], add)[0] for text, add in zip(request.texts, adds, strict=True)]
            texts = self.prompts
        different = [*dict.fromkeys(texts)]
        encoded = dict(zip(different, tokenizer.encode(different), strict=True))
        prompts = [encoded[text] for text in texts]
        return [
            (row, prompt if isinstance(prompt, np.ndarray) else nothing)
            if isinstance(row, np.ndarray)
            else (nothing, nothing)
            for row, prompt in zip(rows, prompts, strict=True)
        ]


def read(body: bodies.Octets) -> Trial:
    """Returns the page's samples to score; raises InvalidRequest.

    A prompt and its responses are pairs, as in other forms; with `template` they go through the checkpoint's chat
    template, as a user's and an assistant's message, and so do whole `messages`.
    """
    asked = bodies.read(body, TrialBody)
    model, prompt = asked.model or "", asked.prompt
    if asked.tokens is not None:
        if prompt or asked.responses or asked.messages or asked.template:
            raise InvalidRequest("the body has tokens, and text, too; send one of both")
        rows = [bodies.to_ids(row) for row in asked.tokens]
        lengths = np.full(len(rows), asked.prompt_length)
        return Trial(
            model, ScoreRequest(tokens=rows, prompt_lengths=lengths), [row[: asked.prompt_length] for row in rows]
        )
    if asked.messages is not None:
        if prompt or asked.responses:
            raise InvalidRequest("the body has messages, and prompt or responses, too; send one of both")
        return _of_messages(model, asked.messages)
    if asked.responses is None:
        raise InvalidRequest(f"the body has no 'responses'; send an object such as {TrialBody.example}")
    responses = to_texts(asked.responses)
    if asked.template:
        before = [{"role": "user", "content": prompt}] if prompt is not None else []
        return _of_messages(model, [[*before, {"role": "assistant", "content": text}] for text in responses])
    if prompt is None:
        return Trial(model, ScoreRequest(texts=responses), [""] * len(responses))
    return Trial(model, pair_samples([prompt], responses), [prompt] * len(responses))


def answer(trial: Trial, info: ModelInfo, reply: ScoreReply, tokenizer: Tokenizer | None) -> TrialReply:
    """The page's view of the scores; pieces of text are the model's own tokens."""
    is_short = sum(reply.lengths) <= MOST_TOKENS and trial.num_characters <= _MOST_CHARACTERS
    told = trial.ids(tokenizer, info) if is_short else [None] * len(reply.results)
    if info.splits_at and reply.tokens:  # tokenised step by step
        told = [ids and (own, ids[1]) for ids, own in zip(told, reply.tokens, strict=True)]
    if trial.request.tokens is not None:  # those that the model refuses may be anything
        told = [ids if isinstance(result, Score) else None for ids, result in zip(told, reply.results, strict=True)]
    return {
        "model": info.name,
        "weights_version": reply.weights_version,
        "queue_s": reply.queue_s,
        "compute_s": reply.compute_s,
        "results": [
            _result(result, info, length or trial.length(i), ids, tokenizer)
            for i, (result, length, ids) in enumerate(zip(reply.results, reply.lengths, told, strict=True))
        ],
    }


def _of_messages(model: str, conversations: list[list[Message]]) -> Trial:
    samples = [of_conversation(check_conversation(one, f"messages[{i}]")) for i, one in enumerate(conversations)]
    groups = [sample.groups for sample in samples if sample.groups is not None]
    all_groups = np.concatenate(groups) if len(groups) == len(samples) else None
    request = ScoreRequest(messages=conversations, groups=all_groups)
    return Trial(model, request, [one[:-1] for one in conversations])


def _plain(conversation: list[Message]) -> list[Message]:
    """The conversation as text; empty if it is invalid."""
    try:
        return plain(conversation)
    except InvalidRequest:
        return [{"role": "assistant", "content": ""}]


def _result(
    result: Score | GuerdonError,
    info: ModelInfo,
    length: int,
    ids: tuple[np.ndarray, np.ndarray] | None,
    tokenizer: Tokenizer | None,
) -> TrialResult:
    told: TrialResult = {
        "reward": None,
        "error": None,
        "attributes": {},
        "components": {},
        "num_tokens": length,
        "tokens": None,
        "steps": None,
    }
    score = None if isinstance(result, GuerdonError) else result
    try:
        if isinstance(result, GuerdonError):
            raise result
        if schema.REWARDS.has(info) and math.isfinite(result.reward):
            told["reward"] = number(result.reward)
        told["components" if info.has_components else "attributes"] = attributes_of(result, info)
    except GuerdonError as e:
        told["error"] = bodies.cut(str(e))
    if ids is None or len(ids[0]) != length:  # what was cut at the start or the end
        return told
    told["tokens"] = _tokens(ids, score, tokenizer)
    if (logprobs := getattr(score and score.answer, "logprobs", None)) is not None:
        own = logprobs[max(0, common_prefix(*ids) - 1) :]
        told["attributes"] = {"log-prob of the response": own.sum(), "per token": own.mean()} if len(own) else {}
    if score is not None and score.steps is not None:
        row = Sequence(ids[0], prompt_length=common_prefix(*ids))
        ends = row.step_ends(info.step_separator_ids)
        if len(ends) == len(score.steps):  # else the rule does not define steps' ends
            steps = zip(ends, score.steps, strict=True)
            told["steps"] = [{"index": int(end), "reward": float(reward)} for end, reward in steps]
    return told


def _tokens(ids: tuple[np.ndarray, np.ndarray], score: Score | None, tokenizer: Tokenizer | None) -> list[TrialToken]:
    tokens, prompt = ids
    num_prompt = common_prefix(tokens, prompt)
    pieces = [f"{i} " for i in tokens.tolist()] if tokenizer is None else tokenizer.pieces(tokens)
    made: list[TrialToken] = [
        {"text": piece, "value": None, "in_prompt": i < num_prompt} for i, piece in enumerate(pieces)
    ]
    if score is not None and score.values is not None:
        for token, value in zip(made, score.values.tolist(), strict=True):
            token["value"] = value
    if score is not None and hasattr(score.answer, "ranks"):
        _add_logprobs(made[1:], score.answer, tokenizer)
    return made


def _add_logprobs(tokens: list[TrialToken], said: TokenLogprobs, tokenizer: Tokenizer | None) -> None:
    """Adds the teacher's answers for all tokens but the first."""
    assert said.logprobs is not None and said.ranks is not None
    for token, value, rank in zip(tokens, said.logprobs.tolist(), said.ranks.tolist(), strict=True):
        token["value"], token["rank"] = value, rank
    if said.top_ids is None or said.top_logprobs is None:
        return
    for token, ids, values in zip(tokens, said.top_ids, said.top_logprobs.tolist(), strict=True):
        texts = [str(i) for i in ids.tolist()] if tokenizer is None else tokenizer.texts_of(ids)
        token["likeliest"] = list(zip(texts, values, strict=True))
