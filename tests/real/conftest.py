"""A reward model for the tests with SmolLM2: its trunk with a random head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from released import SMOLLM2
from transformers import AutoModelForSequenceClassification, AutoTokenizer


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "reward_model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(SMOLLM2, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(folder)
    return folder
