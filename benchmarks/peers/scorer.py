"""The forward that every peer runs: right-padded batches through transformers' own classification model."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification


class Scorer:
    """Scores rows of ids, at most `micro_batch` at a time, in the order given."""

    def __init__(self, folder: str, micro_batch: int = 16) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(self.device).eval()
        self.model.config.use_cache = False  # which nobody reads
        self.micro_batch = micro_batch

    @torch.inference_mode()
    def alone(self, row: np.ndarray) -> float:
        """The reward of one row of ids, without padding or mask."""
        return self.model(input_ids=torch.from_numpy(row)[None].to(self.device)).logits[0, 0].item()

    @torch.inference_mode()
    def padded(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Rewards `[B]` of ids `[B,T]` that are padded behind `lengths` `[B]`."""
        mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long().to(self.device)
        tokens = tokens.to(self.device)
        parts = [
            self.model(input_ids=tokens[i : i + self.micro_batch], attention_mask=mask[i : i + self.micro_batch])
            for i in range(0, len(tokens), self.micro_batch)
        ]
        return torch.cat([part.logits[:, 0] for part in parts]).cpu()

    def score(self, rows: list[list[int]]) -> list[float]:
        """Rewards of ragged rows, each micro-batch padded to its own longest."""
        rewards: list[float] = []
        for i in range(0, len(rows), self.micro_batch):
            part = [torch.tensor(row) for row in rows[i : i + self.micro_batch]]
            tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            rewards += self.padded(tokens, torch.tensor([len(row) for row in part])).tolist()
        return rewards
