"""Computes a forest of shared prefixes with transformers' own cache: a prompt once, its responses from copies.

For trunks whose layers keep a state: in a packed row it would run from one response into the next. Siblings of similar
length are computed together, padded on the right. They need no mask: a causal trunk's states do not depend on padding
behind them, and nothing continues from there.

Legend: T tokens of a micro-batch, H hidden size, B siblings, W tokens of the longest.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from guerdon.engine.packing import Segment, Span

ACTIVATIONS = 16
"""Hidden states whose memory a computed token takes in a forward: a cache counts as many tokens as its bytes take."""
PADDING = 1.25
"""Siblings are computed together if the longest has at most so many times the shortest's tokens."""
LEAST_SAVED = 128
"""Tokens that a prefix must save to have a forward of its own, which reads all weights once more."""


class Continuation:
    """Runs a trunk over segments, each from a copy of the cache behind its parent.

    `pads` computes also rows together that share nothing. Copies of a cache and their tokens fit into the token budget,
    and so do the caches that are kept for further children: beyond it, children compute their parent's tokens again. So
    they do if that costs fewer than `least_saved` tokens. At most `most_rows` are computed together.
    """

    def __init__(self, trunk: Any, *, pads: bool) -> None:
        accepted = inspect.signature(trunk.forward).parameters
        self._name = next((name for name in ("past_key_values", "cache_params") if name in accepted), "")
        # Without positions some trunks count those in the cache of their first layer, which may have none.
        self._takes_positions = "position_ids" in accepted
        self.pads, self.least_saved, self.most_rows = pads, LEAST_SAVED, sys.maxsize

    def hidden_states(self, run: Callable[..., Any], tokens: Tensor, segments: list[Segment], budget: int) -> Tensor:
        """Returns hidden states `[T,H]` of tokens, int64 `[T]`; `run` is the trunk's forward.

        Raises NotImplementedError if the trunk returns no cache.
        """
        children: dict[Span | None, list[Segment]] = defaultdict(list)
        for segment in segments:
            children[segment.ancestors[-1] if segment.ancestors else None].append(segment)
        found: dict[Span, Tensor] = {}

        def compute(group: list[Segment], cache: Any, before: tuple[Span, ...], *, keeps: bool) -> tuple[Any, int]:
            """Computes the segments behind the cache, which lacks the spans before them; returns the new cache's cost.

            A span that was not computed yet has the states of the first row.
            """
            skipped = sum(b - a for a, b in before)
            rows = [torch.cat([tokens[a:b] for a, b in (*before, (s.start, s.stop))]) for s in group]
            hidden, made = self.step(run, rows, copied(cache, len(rows)), group[0].position - skipped, keeps=keeps)
            for own, s in zip(hidden, group, strict=True):
                start = 0
                for a, b in (*before, (s.start, s.stop)):
                    found.setdefault((a, b), own[start : start + b - a])
                    start += b - a
            return made, -(-num_bytes(made) // (ACTIVATIONS * hidden[0, 0].nbytes))

        def below(parent: Span | None, cache: Any, cost: int, before: tuple[Span, ...], live: int) -> None:
            leaves = [s for s in children[parent] if (s.start, s.stop) not in children]
            for group in self.together(leaves, cost + sum(b - a for a, b in before), budget):
                compute(group, cache, before, keeps=False)
            for s in children[parent]:
                if not (own := children.get(span := (s.start, s.stop))):
                    continue
                made, own_cost = None, 0
                if (len(own) - 1) * (s.stop - s.start) >= self.least_saved:
                    made, own_cost = compute([s], cache, before, keeps=True)
                if made is None or (live and live + own_cost > budget):
                    made = None
                    below(span, cache, cost, (*before, span), live)
                else:
                    below(span, made, own_cost, (), live + own_cost)

        below(None, None, 0, (), 0)
        return torch.cat([found[segment.start, segment.stop] for segment in segments])

    def step(
        self, run: Callable[..., Any], rows: list[Tensor], cache: Any, position: int, *, keeps: bool
    ) -> tuple[Tensor, Any]:
        """Returns the hidden states `[B,W,H]` of rows that begin at `position` behind the cache, which it changes.

        Also returns the cache behind them, if it `keeps` it.
        """
        ids = pad_sequence(rows, batch_first=True)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": keeps or cache is not None}
        if cache is not None:
            inputs[self._name] = cache
            if self._takes_positions:
                positions = torch.arange(position, position + ids.shape[1], device=ids.device)
                inputs["position_ids"] = positions.expand_as(ids)
        out = run(**inputs)
        made = getattr(out, self._name, None) if keeps and self._name else None
        if keeps and made is None:
            raise NotImplementedError("its forward returns no cache that a response could continue")
        return out.last_hidden_state, made

    def together(self, leaves: list[Segment], cost: int, budget: int) -> Iterator[list[Segment]]:
        """Yields the segments that are computed together, if what comes before counts as `cost` tokens for each."""
        order = sorted(leaves, key=lambda s: s.start - s.stop)
        while order:
            # Start with the longest: if any batch runs out of memory, it is the first one.
            longest = order[0].stop - order[0].start
            most = max(1, budget // (cost + longest)) if self.pads or order[0].ancestors else 1
            most = min(most, self.most_rows)
            alike = sum(PADDING * (s.stop - s.start) >= longest for s in order[:most])
            yield order[:alike]
            order = order[alike:]


def copied(cache: Any, count: int = 1) -> Any:
    """Returns a copy of a single row's cache for `count` rows, which shares no tensor with it."""
    return mapped(cache, lambda tensor: tensor.repeat(count, *[1] * (tensor.dim() - 1)) if tensor.dim() else +tensor)


def num_bytes(cache: Any) -> int:
    """Returns the bytes of all tensors that a cache refers to."""
    sizes: list[int] = []
    mapped(cache, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a copy of an object, with `change` of each tensor that it refers to in that tensor's place."""
    made: dict[int, Any] = {}  # two references to one object become references to one copy

    def of(value: Any) -> Any:
        if id(value) in made:
            return made[id(value)]
        new = value
        if isinstance(value, Tensor):
            new = change(value)
        elif isinstance(value, dict):
            new = copy.copy(value)
            new.update({key: of(item) for key, item in value.items()})
        elif type(value) in (list, tuple):
            new = type(value)(of(item) for item in value)
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
            new = copy.copy(value)
            vars(new).update(of(vars(value)))
        made[id(value)] = new
        return new

    return of(value)
