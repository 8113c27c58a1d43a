"""A loaded reward model or critic as a function of sequences: `Engine.score`, and `Engine.values` with gradients.

Legend: T tokens, H hidden size, A attributes, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.reward_models import LoadedModel
from guerdon.engine.forward import Forward, HiddenStates
from guerdon.engine.heads import Outputs
from guerdon.engine.microbatches import MicroBatch, deduplicate, typed
from guerdon.engine.self_check import check_finite, choose_path
from guerdon.errors import SampleFailed


class Engine(Forward):
    """Scores sequences with one loaded model, by the fastest path that agrees with the plain forward."""

    takes_all = False

    def __init__(self, loaded: LoadedModel) -> None:
        """Raises CheckpointError as `choose_path`, or if no probe scores."""
        self.head, self.encoder = loaded.head, loaded.encoder
        super().__init__(loaded)
        self._has_types = not self.causal and getattr(self.trunk.config, "type_vocab_size", 0) > 1
        choose_path(self, loaded, reads_last=not loaded.trains)
        self.check_scores(every=False)

    def check_scores(self, *, every: bool = True) -> None:
        """Collective; raises CheckpointError unless every probe, or at least one, has a finite score.

        A model may be served if some of them fail. One that replaces another while it serves must do better.
        """
        check_finite(self, self.score, every=every)

    def score(self, sequences: list[Sequence], *, path: str | None = None) -> list[Score | SampleFailed]:
        """Returns one result for each sequence, in order; equal tokens are computed once.

        Collective if `ranks.in_step`. `path` replaces the chosen path; its attention must be in use.
        """
        rows, limits, starts, slots = deduplicate(sequences)
        outputs = Outputs(self, sequences, rows, slots)
        with self.no_gradients():
            batches = self.plan(rows, limits, path=path)
            for states in self.run(typed(batches, starts) if self._has_types else batches):
                outputs.add(states)
        return outputs.scores()

    def read_states(
        self, states: HiddenStates, rows: list[np.ndarray], ends: dict[int, np.ndarray]
    ) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Returns the states that the head reads, and each row's indices into them: one, or one a token.

        Of a process reward model the head reads only the `ends` of steps; indices of other tokens mean nothing.
        """
        if not self.head.per_token:
            return self.pool(states, rows), [np.array([i]) for i in range(len(states.rows))]
        tokens = [states.gather(i) for i in range(len(states.rows))]
        if not ends:
            return states.hidden, tokens
        read = np.unique(np.concatenate([own[ends[row]] for own, row in zip(tokens, states.rows, strict=True)]))
        place = np.zeros(len(states.hidden), np.int64)
        place[read] = np.arange(len(read))
        return states.hidden[self.to_device(read)], [place[own] for own in tokens]

    def score_plainly(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Scores as transformers runs the model, one sequence at a time: the reference for every path."""
        with self.plain_attention():
            return self.score(sequences, path="single")

    def values(self, rows: list[np.ndarray]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Yields row numbers and their values, float32 `[T_i]` on the device, for each micro-batch.

        They equal those of `score` for a model with one value for each token, with the graph attached if gradients are
        enabled. Call backward before taking the next micro-batch: only one fits into the token budget. If
        `ranks.in_step`, fillers at the end have no row numbers and meaningless values; call backward for them, too.
        """
        assert self.head.per_token and self.head.num_outputs == 1
        for states in self.run(self.plan(rows)):
            table = self.head.merged(self.head(states.hidden))
            own = [torch.cat([table[a:b] for a, b in spans]) for spans in states.spans]
            yield states.rows, own or [table]

    def pool(self, states: HiddenStates, rows: list[np.ndarray]) -> torch.Tensor:
        """Returns the hidden state `[B,H]` that each sequence's reward is read from, by the head's pooling rule.

        For a head that reads two states they stand side by side, `[B,2H]`.
        """
        if self.head.pooling == "mean":
            rows_states = (torch.cat([states.hidden[a:b] for a, b in spans]) for spans in states.spans)
            return torch.stack([hidden.float().mean(0) for hidden in rows_states])
        own = states.hidden[self.to_device(self._reward_indices(states, rows)) if states.read is None else states.read]
        if not self.head.gate_ids:
            return own
        gates = [states.gather(i)[self.head.gate_position(rows[row])] for i, row in enumerate(states.rows)]
        return torch.cat([own, states.hidden[self.to_device(np.array(gates))]], 1)

    def readable(self, states: HiddenStates, rows: list[np.ndarray]) -> list[torch.Tensor]:
        """Returns each row's hidden states that its reward or values are made from."""
        if self._reads_one_state():
            return list(self.pool(states, rows)[:, None])
        return super().readable(states, rows)

    def _reads_one_state(self) -> bool:
        return not self.head.per_token and self.head.pooling != "mean" and not self.head.gate_ids

    def read_indices(self, batch: MicroBatch, rows: list[np.ndarray]) -> np.ndarray | None:
        """Returns the indices of the states that rewards are read from; None if values or a mean need all of them.

        Also None if the batch is not packed: only a packed forward narrows its last layer.
        """
        return self._reward_indices(batch, rows) if batch.packed is not None and self._reads_one_state() else None

    def _reward_indices(self, states: HiddenStates | MicroBatch, rows: list[np.ndarray]) -> np.ndarray:
        """Returns the index of the hidden state that each sequence's reward is read from."""
        own = [rows[row] for row in states.rows]
        read = states.last.copy()
        for i, position in enumerate(self.head.positions(own).tolist()):
            if position != len(own[i]) - 1:
                read[i] = states.gather(i)[position]
        return read

    def parts(self) -> tuple[torch.nn.Module, ...]:
        """Returns trunk and head."""
        return self.trunk, self.head
