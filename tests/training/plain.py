"""A critic's training in plain transformers and torch, one sequence at a time; it never touches guerdon's numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

import zoo
from guerdon.critic_core import TrainRequest


class PlainCritic:
    """A trunk, a linear head and torch's AdamW; `dtype` is that of everything."""

    def __init__(self, folder: Path, *, lr: float, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.trunk: Any = AutoModel.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        state = zoo.tensors(folder)
        self.head = torch.nn.Linear(self.trunk.config.hidden_size, 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(state.get("score.weight", state.get("classifier.weight")))
        self.parameters = {f"trunk.{name}": p for name, p in self.trunk.named_parameters()}
        self.parameters["head.module.0.weight"] = self.head.weight
        self.optimiser = torch.optim.AdamW(
            self.parameters.values(), lr=lr, betas=settings.get("betas", (0.9, 0.98)), eps=1e-8, weight_decay=0.01
        )
        self.largest_norm = settings.get("gradient_clip_val", 1.0)
        self.clip = settings.get("loss_clip_val", 0.2)
        self.dtype = dtype

    def values(self, tokens: np.ndarray) -> torch.Tensor:
        hidden = self.trunk(input_ids=torch.from_numpy(tokens)[None], use_cache=False).last_hidden_state[0]
        return self.head(hidden)[:, 0]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last global batch."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def train(self, request: TrainRequest, size: int) -> tuple[list[float], list[float]]:
        """The losses and the gradient's norms of the request's global batches of `size` rows."""
        losses, norms = [], []
        for start in range(0, len(request), size):
            rows = range(start, min(start + size, len(request)))
            denominator = max(float(request.mask[rows.start : rows.stop].sum()), 1.0)
            total = 0.0
            self.optimiser.zero_grad()
            for i in rows:
                returns, prev, mask = (
                    torch.from_numpy(np.where(request.mask[i] > 0, x[i], 0)).to(self.dtype)
                    for x in (request.returns, request.prev_values, request.mask)
                )
                v = self.values(request.tokens[i])[:-1]
                clipped = prev + torch.clamp(v - prev, -self.clip, self.clip)
                worse = torch.maximum((v - returns) ** 2, (clipped - returns) ** 2)
                loss = 0.5 * (mask * worse).sum() / denominator
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.largest_norm)
            self.optimiser.step()
            losses.append(total)
            norms.append(norm.item())
        return losses, norms


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of the difference, relative to that of `b`."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def request(rows: list[np.ndarray], seed: int = 0, name: str = "first") -> TrainRequest:
    """The rows right-padded, with noise for targets, NaN where nothing counts, and a mask with gaps and weights.

    The mask begins somewhere in the row, as behind a prompt, and ends before its end.
    """
    random = np.random.default_rng(seed)
    count, width = len(rows), max(map(len, rows)) + 3
    tokens = random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, (count, width))
    prev_values, returns = random.standard_normal((2, count, width - 1)).astype(np.float32)
    mask = np.zeros((count, width - 1), np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, len(row) // 2 : len(row) - 1] = random.choice([0.0, 0.5, 1.0], max(0, len(row) - 1 - len(row) // 2))
    returns[mask == 0] = np.nan
    prev_values[mask == 0] = np.inf
    return TrainRequest(name, tokens, returns, prev_values, mask)


TWO_TREES = (-1, 0, 0, 2, 2, 2, -1, 5, 5, 6, 0)


def tree(seed: int = 0, parents: Sequence[int] = TWO_TREES, length: int | None = None) -> TrainRequest:
    """Segments right-padded with anything, some too short to be shared without a `length` of all; a mask with gaps."""
    random = np.random.default_rng(seed)
    above = np.array(parents)
    lengths = random.integers(3, 40, len(above))
    lengths[[0, 2, 5]] = 40, 25, 18
    lengths = lengths if length is None else np.full(len(above), length)
    shape = (len(above), 43)
    tokens = random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, shape)
    prev_values, returns = random.standard_normal((2, *shape)).astype(np.float32)
    mask = np.where(np.arange(43) < lengths[:, None], random.choice([0.0, 0.5, 1.0], shape), 0).astype(np.float32)
    mask[above < 0, 0] = 0
    mask[1:6, 0] = 1  # an action right behind the branch
    returns[mask == 0] = np.nan
    made = TrainRequest("tree", tokens, returns, prev_values, mask)
    made.parents, made.lengths = above, lengths
    return made
