"""A causal language model's log-probs of given tokens, through the packed forward and with gradients.

Legend: T tokens, H hidden size, V logits of a token, N chosen tokens, B sequences, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from guerdon.engine.forward import Forward, Layout
from guerdon.engine.gathering import WHOLE, Gathering, shallow_copy
from guerdon.engine.token_logprobs import token_logprobs
from guerdon.errors import CheckpointError

if TYPE_CHECKING:
    from guerdon.engine.checkpoint.policies import LoadedPolicy

TABLE = 1 << 26
"""Logits that may be held at once, in float32 256 MiB: for more, tokens are taken in parts, each computed again in the
backward pass."""
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest accepted difference of the head's logits from the whole model's, relative to their root mean square."""


class OutputHead:
    """Logits from hidden states by the model's own code: scaling, soft caps, biases and tied weights are as they are.

    The model's forward is run with a stand-in for its trunk that hands the given states on.
    """

    def __init__(self, model: Any, trunk: Any, folder: Path, gathering: Gathering = WHOLE) -> None:
        """Raises CheckpointError where that differs from the logits of the whole model."""
        self._model, self._trunk, self._gathering = model, trunk, gathering
        self._name = next(name for name, child in model.named_children() if child is trunk)
        self._output: Any = None
        try:
            difference = self._difference()
        # Whatever a forward raises that asks its trunk for more than hidden states.
        except Exception as e:
            why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        else:
            if difference <= AGREEMENT.get(model.dtype, 2e-2):
                return
            why = f"they differ by {difference:.1e}"
        raise CheckpointError(
            f"the logits of {folder}, a {type(model).__name__}, cannot be made from its last hidden states: {why}",
            "choose a model of another architecture",
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[N,V]` in the model's dtype for hidden states `[N,H]`, differentiable."""
        # Copied at every call, for adapters may have replaced modules since; a copy shares modules and parameters.
        model = self._gathering.below_root(self._model)
        model._modules = {**self._model._modules, self._name: self._stand_in(self._trunk)}
        return model(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def _stand_in(self, module: Any) -> Any:
        passes = shallow_copy(module)
        # OPT's model passes by its trunk and asks the decoder in it.
        children = {name: self._stand_in(child) for name, child in module.named_children() if name == "decoder"}
        passes._modules = {**module._modules, **children}
        passes.forward = lambda *_, inputs_embeds, **__: self._output(last_hidden_state=inputs_embeds)
        return passes

    def _difference(self) -> float:
        """The largest difference between both ways on a few tokens."""
        with self._gathering.no_gradients():
            return self._difference_of_both()

    def _difference_of_both(self) -> float:
        seen: list[Any] = []
        hook = self._trunk.register_forward_hook(lambda _, __, output: seen.append(output))
        tokens = torch.arange(8, device=self._model.device)[None] % self._model.get_input_embeddings().num_embeddings
        try:
            want = self._model(input_ids=tokens, use_cache=False).logits[0]
            if not seen:
                seen.append(self._gathering.through_root(self._trunk)(input_ids=tokens, use_cache=False))
        finally:
            hook.remove()
        self._output = type(seen[0])
        got = self(seen[0].last_hidden_state[0])
        if got.shape != want.shape:
            return float("inf")
        worst = ((got - want).float().abs().max() / want.float().square().mean().sqrt()).item()
        return worst if np.isfinite(worst) else float("inf")


class LanguageEngine(Forward):
    """One causal language model: the log-probs that it gives to the tokens of responses."""

    def __init__(self, loaded: LoadedPolicy) -> None:
        """Raises as `Forward`."""
        self.head, self._model = loaded.head, loaded.model
        super().__init__(loaded)

    def logprobs(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float = 1.0,
        *,
        with_entropies: bool = False,
    ) -> Iterator[tuple[np.ndarray, Tensor, Tensor | None]]:
        """Micro-batch by micro-batch: rows' numbers int64 `[b]`, the log-probs of their responses, their entropies.

        Both are float32 `[b,R]` on the device, entry r about the response's token r, 0 beyond the response; R is that
        of all rows. Logits are divided by the temperature, and the log-sum-exp is float32. Where gradients are enabled
        the graph is attached: call backward before the next micro-batch is taken, for only one fits the token budget.
        `prompt_lengths` is int64 `[B]`; ValueError where one is 0, for nothing predicts the first token.

        Ranks in step make fillers at the end, with no rows and log-probs `[0,R]`, whose backward must be called, too.
        """
        if len(rows) and min(prompt_lengths) < 1:
            raise ValueError("prompt_lengths has a 0: a response needs at least one token before it")
        width = max((len(row) - int(start) for row, start in zip(rows, prompt_lengths, strict=True)), default=0)
        # What comes after the last token is never read; only where frequencies go by the length it counts. A row of
        # one token has no response, and is there for its place alone.
        seen = rows if self.depends_on_length else [row[: max(1, len(row) - 1)] for row in rows]
        for layout in self.layouts(seen):
            members = np.array(layout.rows, dtype=np.int64)
            if not layout.rows:
                nothing = self.head(layout.hidden[:1]).float().sum() * 0
                yield members, torch.zeros(0, width, device=self.device) + nothing, None
                continue
            at, targets, is_response = self._where(layout, rows, prompt_lengths, width)
            hidden = layout.hidden[at]
            logprobs, entropies = self._of_tokens(hidden, targets, temperature, with_entropies)
            empty = torch.zeros(is_response.shape, device=self.device)
            tables = [None if x is None else empty.masked_scatter(is_response, x) for x in (logprobs, entropies)]
            assert tables[0] is not None
            yield members, tables[0], tables[1]

    def _where(
        self, layout: Layout, rows: list[np.ndarray], prompt_lengths: np.ndarray, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states that predict the response's tokens and these tokens, int64 `[N]`; where they go, bool `[b,R]`."""
        at, targets = [], []
        is_response = np.zeros((len(layout.rows), width), dtype=bool)
        for i, number in enumerate(layout.rows):
            row, start = rows[number], int(prompt_lengths[number])
            at.append(layout.gather(i)[start - 1 : len(row) - 1])
            targets.append(row[start:])
            is_response[i, : len(row) - start] = True
        where = self.index(np.concatenate(at)), self.index(np.concatenate(targets).astype(np.int64, copy=False))
        return *where, self.index(is_response)

    def _of_tokens(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies, float32 `[N]`, in parts of which each one's logits fit the table."""
        size = max(1, TABLE // self._model.get_input_embeddings().num_embeddings)
        if len(hidden) <= size:
            return self._part(hidden, targets, temperature, with_entropies)
        parts = []
        for some, wanted in zip(hidden.split(size), targets.split(size), strict=True):
            if torch.is_grad_enabled():
                # Nothing random happens in a head, so nothing has to come out the same.
                part = checkpoint(
                    self._part, some, wanted, temperature, with_entropies, use_reentrant=False, preserve_rng_state=False
                )
            else:
                part = self._part(some, wanted, temperature, with_entropies)
            parts.append(part)
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if with_entropies else None

    def _part(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(self.head(hidden), targets, temperature, with_entropies=with_entropies)
