"""The garbage collector is off while libraries are imported, and leaves them alone afterwards."""

import gc

import pytest

from guerdon import memory


def test_collections_are_held_and_what_there_is_is_skipped_afterwards() -> None:
    assert gc.isenabled()
    before = gc.get_freeze_count()
    with memory.holding_collections():
        imported = [[number] for number in range(1000)]
        assert not gc.isenabled()
        memory.resume_collections()
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(imported)
        frozen = gc.get_freeze_count()
        made = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() <= frozen and gc.is_tracked(made)


def test_they_are_resumed_if_the_import_fails() -> None:
    with pytest.raises(ImportError), memory.holding_collections():
        raise ImportError
    assert gc.isenabled()
