"""A frozen language model as a teacher: log-probs, likeliest ids, entropies and hidden states of given tokens.

Legend: T tokens, H hidden size, V logits of a token, U hidden states that are read, N asked tokens, K likeliest ids, G
given ids.

Sequences that share a prefix share its hidden states, and ask different things about them. So the head is applied to
each state once, a few states at a time, and everything that is made of logits is read while these few are there: no
table `[T,V]` is ever in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.forward import HiddenStates
from guerdon.engine.heads import LOGITS, export_head
from guerdon.engine.logprobs import LanguageEngine, entropies_of, log_sums, row_slices, scale
from guerdon.engine.microbatches import deduplicate
from guerdon.engine.self_check import check_finite
from guerdon.errors import ConfigError, SampleFailed, Unavailable, Unsupported
from guerdon.teacher_core import HeadFile, LogprobQuery, TokenLogprobs

_PLAIN = LogprobQuery()
_PROBE = LogprobQuery(start=1, with_next=True)

_NUMPY_CANNOT = {torch.bfloat16: torch.uint16}
"""Dtypes that numpy lacks, and those that hold their bits."""


class TeacherEngine(LanguageEngine):
    """Answers each sequence's `LogprobQuery` with one loaded language model."""

    takes_all = False

    def __init__(self, loaded: LoadedPolicy, *, reads_last: bool = False, student: str = "") -> None:
        """`student` is the folder of its students' tokenizer, if that is another.

        Raises CheckpointError as `LanguageEngine`, and if no probe has finite log-probs; ConfigError if a tokenizer is
        missing, and CheckpointError if the student's cannot be read.
        """
        config: Any = loaded.config
        self.encoder = None if loaded.tokenizer is None else TextEncoder(loaded.tokenizer)
        self.student = None if not student else TextEncoder.load(Path(student), warns=False)
        if student and (self.student is None or self.encoder is None):
            lacking = student if self.student is None else config.model
            raise ConfigError(
                f"student_tokenizer is set, and there is no tokenizer in {lacking}",
                "name a folder with the tokenizer's files, such as tokenizer.json and tokenizer_config.json",
            )
        clients = self.student or self.encoder
        info = dataclasses.replace(
            loaded.info,
            name=config.name,
            kind="teacher",
            source=config.model,
            outputs=("logprobs",) if self.student is None else ("logprobs", "chunks"),
            max_top_k=config.max_top_k,
            hidden_size=loaded.head.width,
            takes_prompts=self.encoder is not None,
            vocabulary="" if clients is None else clients.all_tokens_digest(),
            tokenizer="" if clients is None else clients.identity(),
            ending="" if self.encoder is None else self.encoder.reported_ending(),
        )
        self._exporting = threading.Lock()
        # A mixture's teachers may be on several devices, each with a thread that computes.
        self._computing = threading.Lock()
        self._scorers: Mapping[str, Any] = {}
        self._head_file: HeadFile | None = None
        super().__init__(dataclasses.replace(loaded, info=info), reads_last=reads_last)
        check_finite(self, self._probe, every=False)

    def check_scores(self) -> None:
        """Collective; raises CheckpointError unless every probe has finite log-probs, as `Engine.check_scores`."""
        check_finite(self, self._probe, every=True)

    def _probe(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        return self.score([dataclasses.replace(s, ask=_PROBE) for s in sequences])

    def score(self, sequences: list[Sequence], *, path: str | None = None) -> list[Score | SampleFailed]:
        """Returns one result for each sequence, in order; equal tokens are computed once.

        A sequence without a query is asked for the log-probs of its response. `path` replaces the chosen path; its
        attention must be in use.
        """
        return self._answer(sequences, lambda engine, some: engine._score(some, path if engine is self else None))

    def _answer(self, sequences: list[Sequence], score: _Scoring) -> list[Score | SampleFailed]:
        """Returns each sequence's result by `score`, or of a mixture by what `score` makes of it for each teacher."""
        groups: dict[tuple[tuple[str, float], ...], list[int]] = {}
        for i, s in enumerate(sequences):
            key = () if s.ask is None else tuple((part.info.name, part.log_weight) for part in s.ask.mixture)
            groups.setdefault(key, []).append(i)
        found: dict[int, Score | SampleFailed] = {}
        for key, members in groups.items():
            some = [sequences[i] for i in members]
            found |= zip(members, self._mix(some, dict(key), score) if key else score(self, some), strict=True)
        return [found[i] for i in range(len(sequences))]

    def _score(self, sequences: list[Sequence], path: str | None) -> list[Score | SampleFailed]:
        with self._computing:
            return self._score_alone(sequences, path)

    def _score_alone(self, sequences: list[Sequence], path: str | None) -> list[Score | SampleFailed]:
        if not sequences:
            return []
        rows, limits, _, slots = deduplicate(sequences)
        askers = _Askers(sequences, slots)
        whole = askers.slots_that_go_on | (askers.slots_as_sent if self.needs_last(path or self.path) else set())
        seen = [row if i in whole else row[: max(1, len(row) - 1)] for i, row in enumerate(rows)]
        parts: list[_Part] = []
        with self.no_gradients():
            for states in self.run(self.plan(seen, limits, path=path)):
                parts += [self._read(states, form, asked) for form, asked in askers.of(states)]
        # Nothing before this line waits for the device.
        results = dict(answer for part in parts for answer in part.answers())
        return [results[number] for number in range(len(sequences))]

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Scores as transformers runs the model, one sequence at a time: the reference for every path."""

        def plainly(engine: TeacherEngine, some: list[Sequence]) -> list[Score | SampleFailed]:
            with engine._computing, engine.plain_attention():
                return engine._score_alone(some, "single")

        return self._answer(sequences, plainly)

    def meet(self, scorers: Mapping[str, Any]) -> None:
        """Sets the worker's models by name, among which are the teachers of mixtures."""
        self._scorers = scorers

    def head_file(self) -> HeadFile:
        """Returns the output head, from any thread; raises Unsupported if it is split over ranks or of another form."""
        with self._exporting:
            if self._head_file is None:
                if self.ranks.is_sharded:
                    raise Unsupported(
                        f"the head of {self.info.name} is split over ranks; fetch it from a server without "
                        "--tensor-parallel, or read it from the checkpoint"
                    )
                info = self.info
                self._head_file = export_head(self._model, self.head, info.name, info.weights_version)
            return self._head_file

    def sleep(self) -> int:
        """As `Resting.sleep`; the output head's file, which holds its weights, is made again after it."""
        with self._exporting:
            self._head_file = None
        with self._computing:
            return super().sleep()

    def _read(self, states: HiddenStates, form: _Form, asked: list[_Asked]) -> _Part:
        """Returns the sequences' answers from one micro-batch's states, still on the device."""
        at, state_of = np.unique(np.concatenate([one.at for one in asked]), return_inverse=True)
        hidden = states.hidden[self.to_device(at)]
        part = _Part(form, asked, state_of)
        if form.with_hidden:
            part.by_state["hidden"] = hidden.to(torch.bfloat16) if form.rounds_hidden else hidden
        if form.needs_head:
            self._read_head(part, self._tables(hidden, form.temperature))
        return part

    def _mix(
        self, sequences: list[Sequence], log_weights: dict[str, float], score: _Scoring
    ) -> list[Score | SampleFailed]:
        """Returns the answers of a mixture of teachers, whose hidden states exist together, and whose logits do not."""
        engines: list[TeacherEngine] = []
        for name in log_weights:
            teacher = self._scorers.get(name)
            if not isinstance(teacher, TeacherEngine) or not teacher.is_awake:
                raise Unavailable(f"{name}, a teacher of the mixture, is unloaded or asleep; try again later")
            engines.append(teacher)
        versions = tuple((engine.info.name, engine.info.weights_version) for engine in engines)
        found: dict[int, Score | SampleFailed] = {}
        hidden: list[list[np.ndarray]] = []
        for engine in engines:
            results = score(engine, [_for_hidden(s) for s in sequences])
            found |= {i: result for i, result in enumerate(results) if isinstance(result, SampleFailed)}
            hidden.append([np.empty(0) if isinstance(r, SampleFailed) else r.answer.hidden for r in results])
        forms: dict[_Form, list[int]] = {}
        for i, s in enumerate(sequences):
            if i not in found:
                forms.setdefault(_Form.of(s.ask), []).append(i)
        for form, members in forms.items():
            ends = np.cumsum([0, *(len(hidden[0][i]) for i in members)])
            places = [np.arange(start, stop) for start, stop in itertools.pairwise(ends.tolist())]
            asked = [_Asked.of(i, sequences[i], at) for i, at in zip(members, places, strict=True)]
            states = [np.concatenate([own[i] for i in members]) for own in hidden]
            part = _Part(form, asked, np.arange(ends[-1]))
            with self.no_gradients():
                self._read_head(
                    part, self._mixed_tables([*zip(engines, states, log_weights.values(), strict=True)], form)
                )
            found |= part.answers()
        for result in found.values():
            if isinstance(result, Score):
                result.answer.versions = versions
        return [found[i] for i in range(len(sequences))]

    def _tables(self, hidden: Tensor, temperature: float) -> Iterator[tuple[int, Tensor]]:
        """Yields the log-probs `[u,V]` of a few states at a time, and the first state's index.

        Those of a state are NaN if a logit is NaN or +inf, or if all are -inf.
        """
        size = max(1, LOGITS.get(hidden.device.type, 1 << 26) // (self.info.vocab_size or 1))
        for start in range(0, len(hidden), size):
            logits = self.head(hidden[start : start + size])
            for rows in row_slices(logits):
                yield start + rows.start, torch.log_softmax(scale(logits[rows], temperature), -1)
            del logits

    def _mixed_tables(
        self, sources: list[tuple[TeacherEngine, np.ndarray, float]], form: _Form
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields a mixture's log-probs, as `_tables`; at any time one teacher's logits are in memory."""
        width = max(engine.info.vocab_size or 1 for engine, _, _ in sources)
        count, size = len(sources[0][1]), max(1, LOGITS.get(self.device.type, 1 << 26) // width)
        for start in range(0, count, size):
            mixed = torch.full((min(size, count - start), width), -torch.inf, device=self.device)
            for engine, states, log_weight in sources:
                some = torch.from_numpy(states[start : start + size])
                hidden = (some.view(torch.bfloat16) if some.dtype == torch.uint16 else some).to(engine.device)
                for first, table in engine._tables(hidden, form.temperature):
                    _add(mixed[first : first + len(table), : table.shape[1]], table.add_(log_weight).to(mixed.device))
            for rows in row_slices(mixed):
                yield start + rows.start, mixed[rows]
            del mixed

    def _read_head(self, part: _Part, tables: Iterator[tuple[int, Tensor]]) -> None:
        """Reads from log-probs, a few states' at a time, what is asked about the states and about each token."""
        form, asked, state_of = part.form, part.asked, part.state_of
        vocab_size = self.info.vocab_size or 1
        targets = np.concatenate([one.targets for one in asked])
        given = None
        if form.has_given:
            width = max(one.given.shape[1] for one in asked)
            wide = [np.pad(x.given, ((0, 0), (0, width - x.given.shape[1])), constant_values=-1) for x in asked]
            order = np.argsort(state_of, kind="stable")
            part.token_of = np.argsort(order)
            given = self.to_device(np.concatenate(wide)[order])
        else:  # tokens of a shared prefix are asked once
            _, order, part.token_of = np.unique(state_of * vocab_size + targets, return_index=True, return_inverse=True)
        num_states = int(state_of.max(initial=-1)) + 1
        self._read_tables(part, tables, num_states, state_of[order], self.to_device(targets[order]), given)

    def _read_tables(
        self,
        part: _Part,
        tables: Iterator[tuple[int, Tensor]],
        num_states: int,
        state_of: np.ndarray,
        targets: Tensor,
        given: Tensor | None,
    ) -> None:
        """Reads what is asked about each of the states, and about each token.

        Token i is predicted by state `state_of[i]` (int64 `[N]`, ascending). `targets` is int64 `[N]`, `given` `[N,G]`.
        """
        form, by_state, by_token = part.form, part.by_state, part.by_token

        # Results are made first: small ones that stay, allocated between large tables that go, would fragment the heap,
        # and malloc would take new memory for every chunk.
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=targets.device)

        if form.with_entropy:
            by_state["entropy"] = empty(num_states)
        if form.num_top:
            by_state["top_logprobs"] = empty(num_states, form.num_top)
            by_state["top_ids"] = empty(num_states, form.num_top, dtype=torch.int32)
        if form.with_rest:
            by_state["rest"] = empty(num_states)
        if form.with_logprobs:
            by_token["logprobs"] = empty(len(targets))
        if form.with_ranks:
            by_token["ranks"] = empty(len(targets), dtype=torch.int32)
        if given is not None:
            by_token["given_logprobs"] = empty(*given.shape)
        for first, table in tables:
            stop = first + len(table)
            low, high = np.searchsorted(state_of, [first, stop])
            if form.with_entropy:
                by_state["entropy"][first:stop].copy_(entropies_of(table))
            if high > low:
                own = self.to_device(state_of[low:high] - first)
                wanted = None if given is None else given[low:high]
                results = {name: into[low:high] for name, into in by_token.items()}
                _read_tokens(table, own, targets[low:high], wanted, results)
            if form.num_top:
                top, ids = table.topk(form.num_top, -1)
                by_state["top_logprobs"][first:stop].copy_(top)
                by_state["top_ids"][first:stop].copy_(ids)
                if form.with_rest:
                    by_state["rest"][first:stop].copy_(log_sums(table.scatter_(1, ids, -torch.inf)))
                del top, ids
            del table


# --------------------------------------------------------------------------------------------- who asks what


_Scoring = Callable[[TeacherEngine, list[Sequence]], list[Score | SampleFailed]]


@dataclass(frozen=True, slots=True)
class _Form:
    """What queries that are answered together have in common."""

    temperature: float
    top_k: int
    has_given: bool
    needs_head: bool
    with_logprobs: bool
    with_entropy: bool
    with_ranks: bool
    with_rest: bool
    with_next: bool
    with_hidden: bool
    rounds_hidden: bool

    @classmethod
    def of(cls, query: LogprobQuery) -> _Form:
        own = {f.name: getattr(query, f.name) for f in dataclasses.fields(cls) if f.name != "has_given"}
        return cls(**own, has_given=query.given is not None)

    @property
    def num_top(self) -> int:
        return max(self.top_k, 1) if self.with_next else self.top_k


@dataclass(slots=True)
class _Asked:
    """One sequence's query of one micro-batch: indices of the states that it reads, and the tokens they predict.

    `at` and `targets` are int64 `[N]`, and `given` is int64 `[N,G]`; after the last token the target means nothing.
    """

    number: int
    at: np.ndarray
    targets: np.ndarray
    given: np.ndarray

    @classmethod
    def of(cls, number: int, s: Sequence, at: np.ndarray) -> _Asked:
        """Returns a sequence's query, whose states from the first that it reads on are at `at`."""
        query = s.ask or _PLAIN
        targets = s.tokens[query.first(s.prompt_length) :]
        given = np.empty((len(targets), 0), np.int64) if query.given is None else query.given
        given = np.broadcast_to(given, (len(targets), given.shape[0])) if given.ndim == 1 else given
        given = given[: len(targets)]
        if query.with_next:
            targets = np.append(targets, 0)
            given = np.pad(given, ((0, 1), (0, 0)), constant_values=-1)
        return cls(number, at[: len(targets)], targets, given)


class _Askers:
    """The sequences by the rows that they read."""

    def __init__(self, sequences: list[Sequence], slots: list[int]) -> None:
        self._sequences = sequences
        self._queries = [s.ask or _PLAIN for s in sequences]
        self._of_slot: dict[int, list[int]] = {}
        for number, slot in enumerate(slots):
            self._of_slot.setdefault(slot, []).append(number)
        asked = list(zip(slots, self._queries, strict=True))
        self.slots_that_go_on = {slot for slot, query in asked if query.with_next}
        self.slots_as_sent = {slot for slot, query in asked if not query.ends_in_placeholder}

    def of(self, states: HiddenStates) -> list[tuple[_Form, list[_Asked]]]:
        """Returns the queries whose rows are in the micro-batch, by kind."""
        found: dict[_Form, list[_Asked]] = {}
        for i, slot in enumerate(states.rows):
            at = states.gather(i)
            for number in self._of_slot[slot]:
                query, first = self._queries[number], self._queries[number].first(self._sequences[number].prompt_length)
                asked = _Asked.of(number, self._sequences[number], at[first - 1 :])
                found.setdefault(_Form.of(query), []).append(asked)
        return list(found.items())


@dataclass(slots=True)
class _Part:
    """The results of one micro-batch for queries of one form, by state and by asked token.

    `state_of` is each asked token's row in `by_state`, `token_of` its row in `by_token`.
    """

    form: _Form
    asked: list[_Asked]
    state_of: np.ndarray
    token_of: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    by_state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    by_token: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def answers(self) -> Iterator[tuple[int, Score | SampleFailed]]:
        """Yields each sequence's number and result."""
        form = self.form
        states = {name: _to_host(table) for name, table in self.by_state.items()}
        tokens = {name: _to_host(table) for name, table in self.by_token.items()}
        stop = 0
        for one in self.asked:
            start, stop = stop, stop + len(one.at)
            end = stop - 1 if form.with_next else stop
            made = TokenLogprobs(**{name: table[self.token_of[start:end]] for name, table in tokens.items()})
            if made.given_logprobs is not None:
                made.given_logprobs = made.given_logprobs[:, : one.given.shape[1]]
            own = {name: table[self.state_of[start:end]] for name, table in states.items()}
            made.hidden, made.entropy, made.rest = own.get("hidden"), own.get("entropy"), own.get("rest")
            made.tokens = one.targets[: end - start].astype(np.int32)
            if form.top_k:
                made.top_ids, made.top_logprobs = own["top_ids"], own["top_logprobs"]
            if form.with_next:
                last = self.state_of[end]
                made.next_ids, made.next_logprobs = states["top_ids"][last].copy(), states["top_logprobs"][last].copy()
            yield one.number, Score(reward=np.nan, answer=made) if (error := _failure(made)) is None else error


def _to_host(table: Tensor) -> np.ndarray:
    return table.view(_NUMPY_CANNOT.get(table.dtype, table.dtype)).cpu().numpy()


def _failure(made: TokenLogprobs) -> SampleFailed | None:
    """Returns the error if numbers are NaN: all that a softmax without a finite normaliser gives is."""
    for name in ("logprobs", "next_logprobs", "entropy", "top_logprobs", "rest", "given_logprobs", "hidden"):
        table = getattr(made, name)
        if table is None:
            continue
        is_nan = np.isnan(table) if table.dtype != np.uint16 else (table & 0x7FFF) > 0x7F80
        if is_nan.any():
            what = "hidden states" if name == "hidden" else "logits"
            return SampleFailed(
                f"the model's {what} for asked token {int(np.argwhere(is_nan)[0][0])} of this sample are not finite; "
                "if other samples fail likewise, try --dtype float32 or bfloat16"
            )
    return None


def _for_hidden(s: Sequence) -> Sequence:
    """Returns the sequence that asks one teacher of a mixture for hidden states, the next token's included."""
    query = s.ask
    asked = LogprobQuery(query.first(s.prompt_length), with_logprobs=False, with_hidden=True)
    if not query.with_next:
        return dataclasses.replace(s, ask=asked)
    asked = dataclasses.replace(asked, ends_in_placeholder=True)
    return dataclasses.replace(s, tokens=np.append(s.tokens, s.tokens[-1:]), ask=asked)


def _add(logs: Tensor, table: Tensor) -> None:
    """Makes each number of `logs` the logarithm of the sum of what it and that of `table` are logarithms of.

    With the same bits among any rows: PyTorch's `logaddexp` computes the last numbers of each thread's share otherwise.
    """
    # Of two that are -inf the difference is NaN; if one is NaN, so is the larger.
    smaller = (logs - table).abs_().neg_().nan_to_num_(nan=-torch.inf).exp_().log1p_()
    torch.maximum(logs, table, out=logs).add_(smaller)


def _read_tokens(
    table: Tensor, state_of: Tensor, targets: Tensor, given: Tensor | None, into: dict[str, Tensor]
) -> None:
    actual = table[state_of, targets]
    if "logprobs" in into:
        into["logprobs"].copy_(actual)
    if "ranks" in into:
        size = len(table)  # as many rows at once as fit the caches: many tokens may have the same state
        for some, least, ranks in zip(*(x.split(size) for x in (state_of, actual, into["ranks"])), strict=True):
            ranks.copy_((table[some] >= least[:, None]).sum(-1))
    if given is not None:
        found = table[state_of[:, None], given.clamp(min=0)]
        into["given_logprobs"].copy_(found.masked_fill_(given < 0, 0.0))
