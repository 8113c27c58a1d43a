"""The samples of a soak's clients, with few imports, because a killed client must restart fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VARIANTS = ("a", "b")
"""Two reward models of one shape, between which the server is switched."""


def samples(folder: Path) -> list[dict[str, Any]]:
    """Returns the samples that `soak_models.make` wrote: `text`, `tokens`, and each variant's score."""
    return json.loads((folder / "samples.json").read_text())


def rows(number: int) -> dict[str, np.ndarray]:
    """Returns the train request of that number; deterministic."""
    rng = np.random.default_rng((7, number))
    num_rows, width = int(rng.integers(2, 11)), int(rng.integers(8, 40))
    returns, values = rng.normal(size=(2, num_rows, width - 1)).astype(np.float32)
    mask = (np.arange(width - 1) >= width // 2).astype(np.float32)[None].repeat(num_rows, 0)
    tokens = rng.integers(3, 90, (num_rows, width))
    return {"tokens": tokens, "returns": returns, "prev_values": values, "mask": mask}
