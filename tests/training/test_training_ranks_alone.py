"""Parts of training on many ranks that one process can test."""

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from guerdon.distributed.ranks import ALONE, Member, Ranks
from guerdon.errors import CheckpointError, ConfigError, ServerFault
from guerdon.settings.config import CriticConfig
from guerdon.training import collectives
from guerdon.training import trainer_checkpoint as tensor_files
from guerdon.training.optimiser import check_layout


@pytest.mark.parametrize(
    ("settings", "ranks", "word"),
    [
        ({"lora": 4}, Ranks(size=2, tensor_size=2), "fsdp"),
        ({"optimizer": "adamw_8bit"}, Ranks(size=2, tensor_size=2), "adamw"),
        ({"optimizer": "adamw_8bit"}, Ranks(size=2, fsdp=True), "adamw"),
    ],
)
def test_settings_that_no_layout_can_have_are_refused(settings: dict, ranks: Ranks, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(CriticConfig(**settings), ranks)
    assert word in caught.value.help
    check_layout(CriticConfig(**settings), ALONE)
    check_layout(CriticConfig(**settings), Ranks(size=2))


def test_adapters_go_with_fsdp_and_8_bits_with_adapters() -> None:
    check_layout(CriticConfig(lora=4), Ranks(size=2, fsdp=True))
    check_layout(CriticConfig(lora=4, optimizer="adamw_8bit"), Ranks(size=2, fsdp=True))


def test_one_process_raises_its_own_errors() -> None:
    with pytest.raises(KeyError, match="its own"), collectives.share_errors(ALONE):
        raise KeyError("its own")


class Two(Ranks):
    """Rank 0 of two, of which the other has not failed."""

    def tell_all(self, what: Any) -> list[Any]:
        return [what, None]


def test_an_error_of_many_ranks_holds_no_tensors_once_it_is_done_with() -> None:
    held: list[weakref.ref] = []

    def fails() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise KeyError("no memory")

    gc.disable()
    try:
        ranks = Two(size=2, members=(Member(0, "one", 7), Member(1, "two", 8)))
        with contextlib.suppress(ServerFault), collectives.share_errors(ranks):
            fails()
        assert [tensor() for tensor in held] == [None]
    finally:
        gc.enable()


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3.0), "count": torch.tensor(7)}


def stored(folder: Path) -> Path:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(TENSORS, storage_writer=writer, no_dist=True)
    return folder


def test_parts_are_read_into_whole_tensors(tmp_path: Path) -> None:
    folder = stored(tmp_path / "optimizer")
    assert tensor_files.shapes_of_shards(folder, TENSORS) == {"a": (2, 3), "step": (), "count": ()}
    own = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    tensor_files.read_into(folder, own)
    assert all(torch.equal(own[name], tensor) for name, tensor in TENSORS.items())


def test_a_cut_file_and_an_absent_one_are_told(tmp_path: Path) -> None:
    folder = stored(tmp_path / "optimizer")
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"is truncated: it has .* bytes"):
        tensor_files.shapes_of_shards(folder, TENSORS)
    file.unlink()
    with pytest.raises(CheckpointError, match="no tensor files"):
        tensor_files.shapes_of_shards(folder, TENSORS)


def test_a_last_part_that_is_missing_is_told(tmp_path: Path) -> None:
    """The files do not show that there was more behind what they hold."""
    own = TENSORS | {"a": torch.zeros(4, 3)}
    with pytest.raises(CheckpointError, match="6 of the 12 values of a: files are missing"):
        tensor_files.shapes_of_shards(stored(tmp_path / "optimizer"), own)
    # Of a larger one all is there: which is another model's, as `check_same` says.
    own = TENSORS | {"a": torch.zeros(1, 3)}
    assert tensor_files.shapes_of_shards(tmp_path / "optimizer", own)["a"] == (2, 3)
