"""Rewards, values and log-probs on CPUs have the same bits alone, in any batch, shared or not, with any threads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine.native.library import find
from guerdon.settings.config import ModelConfig, TeacherConfig
from guerdon.teacher_core import LogprobQuery
from same_bits import assert_same_bits

pytestmark = pytest.mark.skipif(find()[0] is None, reason=f"no kernels: {find()[1]}")
DTYPES = ["float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16"))]
PACKED = [
    name for name in zoo.ARCHITECTURES if name not in ("deberta-v2", "gptj", "falcon", "mamba", "jamba")
]  # whose attention is in transformers' registry, and without a state


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PACKED)
def test_rewards(name: str, dtype: str, tmp_path: Path) -> None:
    folder = str(zoo.checkpoint(name, tmp_path))

    def make(budget: int) -> Any:
        return build_scorer(ModelConfig(model=folder, dtype=dtype, max_batch_tokens=budget)).score

    scorer = build_scorer(ModelConfig(model=folder, dtype=dtype))
    assert scorer.info.path.startswith("packed"), scorer.info.why
    assert scorer.same_bits and "same bits in any batch" in scorer.info.proofs, scorer.info.proofs
    assert_same_bits(make, [Sequence(row) for row in [*zoo.rows(1), np.array([7])]])


LARGE = {
    "llama": {"hidden_size": 104, "intermediate_size": 1003, "head_dim": 26},
    "gemma2": {"hidden_size": 104, "intermediate_size": 1003, "head_dim": 26},
    "phi3": {"hidden_size": 104, "intermediate_size": 1003},
    "gpt2": {"n_embd": 104, "n_inner": 1003},
    "gpt-neox": {"hidden_size": 104, "intermediate_size": 1003},
    "opt": {"hidden_size": 104, "ffn_dim": 1003, "word_embed_proj_dim": 104},
    "bert": {"hidden_size": 104, "intermediate_size": 1003},
    "modernbert": {"hidden_size": 104, "intermediate_size": 1003, "classifier_pooling": "mean"},
    "mixtral": {"hidden_size": 104, "intermediate_size": 1000},
    "gpt-oss": {"hidden_size": 104, "intermediate_size": 1000},
    "llama4": {"hidden_size": 104, "intermediate_size": 1000, "intermediate_size_mlp": 1003},
}
"""Odd widths, and so many numbers that PyTorch splits them among threads anywhere."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_rewards_of_models_of_odd_widths(name: str, dtype: str, tmp_path: Path) -> None:
    folder = str(zoo.checkpoint(name, tmp_path, **LARGE[name]))

    def make(budget: int) -> Any:
        return build_scorer(ModelConfig(model=folder, dtype=dtype, max_batch_tokens=budget)).score

    assert_same_bits(make, [Sequence(row) for row in zoo.rows(2, groups=((40, 6), (200, 5), (101, 1)))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "gpt-oss", "cohere", "granite"])
def test_log_probs_of_a_teacher(name: str, dtype: str, tmp_path: Path) -> None:
    folder = str(zoo.language_model(name, tmp_path))

    def make(budget: int) -> Any:
        return build_scorer(TeacherConfig(model=folder, dtype=dtype, max_batch_tokens=budget)).score

    query = LogprobQuery(start=1, with_entropy=True, top_k=3)
    assert_same_bits(make, [Sequence(row, query=query) for row in zoo.rows(3, least=2)])


@pytest.mark.parametrize("kind", ["tokcls", "trlx-critic"])
def test_values_of_every_token(kind: str, tmp_path: Path) -> None:
    folder = str(zoo.checkpoint("llama", tmp_path, kind))

    def make(budget: int) -> Any:
        return build_scorer(ModelConfig(model=folder, max_batch_tokens=budget)).score

    assert_same_bits(make, [Sequence(row) for row in zoo.rows(4)])


def test_only_models_with_products_of_their_own_are_looked_at_for_them(tmp_path: Path) -> None:
    llama = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path / "llama"))))
    mixtral = build_scorer(ModelConfig(model=str(zoo.checkpoint("mixtral", tmp_path / "mixtral"))))
    assert mixtral._by_rows and not llama._by_rows


def test_a_model_that_cannot_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(zoo.checkpoint("llama", tmp_path))
    monkeypatch.setattr("guerdon.engine.independence.find", lambda: (None, "no compiler"))
    scorer = build_scorer(ModelConfig(model=folder))
    assert not scorer.same_bits and "bits may change with the batch: no compiler" in scorer.info.proofs
    monkeypatch.undo()
    plain = torch.nn.functional.linear
    monkeypatch.setattr("guerdon.engine.linear.product", plain)  # of any number of rows, by MKL
    monkeypatch.setattr("guerdon.engine.row_products.product", plain)
    monkeypatch.setattr("guerdon.engine.fewer_passes.linear.REPLACEMENTS", {})
    scorer = build_scorer(ModelConfig(model=folder))
    (said,) = [proof for proof in scorer.info.proofs if "bits" in proof]
    assert not scorer.same_bits and "sequences have others in another one" in said
