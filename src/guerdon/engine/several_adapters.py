"""Several adapters over one base model, each a model of its own to clients, in one batch."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np

from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.reward_models import LoadedModel
from guerdon.engine.engine import Engine
from guerdon.engine.forward import HiddenStates
from guerdon.engine.heads import Outputs
from guerdon.engine.microbatches import MicroBatch, deduplicate
from guerdon.engine.self_check import check_finite
from guerdon.errors import SampleFailed


class AdapterEngine(Engine):
    """One of the `members` over a trunk, the `index`-th; each scores batches with rows of all of them.

    A sequence's `adapter` is the index of its own. The trunk takes ids as `low_rank` says, so that the self-check of
    all members is one, with ids of all of them beside each other in its rows. The last layer is not narrowed.
    """

    def __init__(self, loaded: list[LoadedModel]) -> None:
        """Makes all members, of which this is the first; raises as `Engine`."""
        self.index, self.members = 0, [self]
        first = loaded[0].info
        self._vocab_size = first.vocab_size or 0
        every = dataclasses.replace(first, vocab_size=len(loaded) * self._vocab_size)
        super().__init__(dataclasses.replace(loaded[0], info=every))
        path, why, proved = self.path, self.info.why, self.info.proofs[len(first.proofs) :]
        for i, own in enumerate(loaded):
            member = copy.copy(self) if i else self
            member.index, member.head, member.encoder = i, own.head, own.encoder
            kind = f"adapter: {own.origin.adapter}, one of {len(loaded)} that share it"
            proofs = (kind, *own.info.proofs, *proved)
            member.info = dataclasses.replace(own.info, path=path, why=why, proofs=proofs)
            if i:
                self.members.append(member)
        for member in self.members:
            member.check_scores(every=False)

    def check_scores(self, *, every: bool = True) -> None:
        """Collective; raises CheckpointError unless every probe, or at least one, has a finite score."""
        if self.info.vocab_size == self._vocab_size:  # else it is not complete yet
            check_finite(
                self, lambda x: self.score([dataclasses.replace(s, adapter=self.index) for s in x]), every=every
            )

    def score(self, sequences: list[Sequence], *, path: str | None = None) -> list[Score | SampleFailed]:
        """Returns one result for each sequence, in order, each by its own adapter and head."""
        rows: list[np.ndarray] = []
        limits: list[int | None] = []
        made: list[tuple[Outputs, list[int], range]] = []
        for i, member in enumerate(self.members):
            places = [k for k, s in enumerate(sequences) if s.adapter == i]
            mine = [sequences[k] for k in places]
            own, their_limits, _, slots = deduplicate(mine)
            made.append((Outputs(member, mine, own, slots), places, range(len(rows), len(rows) + len(own))))
            rows += [row + i * self._vocab_size for row in own]
            limits += their_limits
        with self.no_gradients():
            for states in self.run(self.plan(rows, limits, path=path)):
                for outputs, _, numbers in made:
                    some = [k for k, row in enumerate(states.rows) if row in numbers]
                    own_rows, spans = [states.rows[k] - numbers.start for k in some], [states.spans[k] for k in some]
                    outputs.add(HiddenStates(states.hidden, own_rows, spans, states.last[some]))
        scores: dict[int, Score | SampleFailed] = {}
        for outputs, places, _ in made:
            scores |= zip(places, outputs.scores(), strict=True)
        return [scores[k] for k in range(len(sequences))]

    def read_indices(self, batch: MicroBatch, rows: list[np.ndarray]) -> np.ndarray | None:
        """Returns None: a narrowed layer would not take all tokens, and with them whose they are."""
        return None

    def leave_path(self, why: str) -> None:
        """Makes every later forward of all members the plain one, and warns."""
        super().leave_path(why)
        for member in self.members:
            proofs = (member.info.proofs[0], *self.info.proofs[1:])
            member.info = dataclasses.replace(member.info, path=self.path, why=self.info.why, proofs=proofs)
            member.path = self.path
            member.use(self.path)
