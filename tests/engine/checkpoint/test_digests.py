"""Digests of whole files: what is remembered of them, and when it no longer holds."""

import hashlib
import os
from pathlib import Path

import pytest

from guerdon.engine.checkpoint import digests
from guerdon.errors import CheckpointError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, in which files count as settled at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED_S", -1e9)
    monkeypatch.setattr(digests, "CHUNK", 1000)
    forget(monkeypatch)
    return tmp_path / "cache" / "guerdon" / "digests"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does as if another process began."""
    monkeypatch.setattr(digests, "_cached", {})


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the files that a chunk was hashed of."""
    names: list[str] = []
    hash_chunk = digests._hash_chunk

    def hash_and_note(path: Path, start: int) -> bytes:
        names.append(path.name)
        return hash_chunk(path, start)

    monkeypatch.setattr(digests, "_hash_chunk", hash_and_note)
    return names


def digest(*paths: Path) -> list[str]:
    return digests.digest_files(paths).result(120)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_every_byte_counts(tmp_path: Path) -> None:
    data = os.urandom(3500)
    seen = set()
    for at in (None, 0, 999, 1000, 2500, 3499):
        changed = bytearray(data)
        if at is not None:
            changed[at] ^= 1
        seen.update(digest(write(tmp_path / f"at-{at}", changed)))
    assert len(seen) == 6
    assert digest(write(tmp_path / "twin", data)) == digest(tmp_path / "at-None")
    assert len({*digest(*(write(tmp_path / f"{n}", data[:n]) for n in (0, 1, 1000, 2000)))}) == 4


def test_a_digest_is_that_of_the_chunks_digests(tmp_path: Path) -> None:
    data = os.urandom(2500)
    chunks = [hashlib.blake2b(data[i : i + 1000], digest_size=32).digest() for i in (0, 1000, 2000)]
    assert digest(write(tmp_path / "a", data)) == [hashlib.blake2b(b"".join(chunks), digest_size=16).hexdigest()]


def test_a_second_start_does_not_hash_again(
    tmp_path: Path, cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (write(tmp_path / name, os.urandom(1500)) for name in ("a", "b"))
    first = digest(a, b)
    assert hashed == ["a", "a", "b", "b"] and len(list(cache.iterdir())) == 2
    assert digest(a, b) == first and len(hashed) == 4
    forget(monkeypatch)
    assert digest(b, a) == first[::-1] and len(hashed) == 4


def test_a_file_that_was_changed_with_its_size_and_time_kept_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", b"x" * 1500)
    before, stat = digest(path), path.stat()
    with path.open("r+b") as file:
        file.write(b"y")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_ino == stat.st_ino and path.stat().st_mtime_ns == stat.st_mtime_ns
    assert digest(path) != before
    forget(monkeypatch)
    assert digest(path) != before


def test_the_digest_of_a_file_that_has_just_changed_is_not_cached(
    tmp_path: Path, cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_S", 1e9)
    path = write(tmp_path / "a", b"x")
    assert digest(path) == digest(path)
    assert hashed == ["a", "a"] and not cache.exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "another's"])
def test_a_damaged_entry_is_not_believed(
    damage: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write(tmp_path / "a", b"x"), write(tmp_path / "b", b"y")
    first, _ = digest(path, other)
    entry, others = sorted(cache.iterdir(), key=lambda entry: first not in entry.read_text())
    text = entry.read_text()
    at = text.index(first)
    flipped = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    entry.write_text({"cut": text[:-9], "empty": "", "flipped": flipped, "another's": others.read_text()}[damage])
    forget(monkeypatch)
    assert digest(path) == [first]
    assert entry.read_text() == text


@pytest.mark.parametrize("home", ["file", "nowhere", "/proc/nowhere"])
def test_a_cache_folder_that_cannot_be_written_is_no_harm(
    home: str, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    if home == "nowhere":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
    path = write(tmp_path / "a", b"x")
    assert digest(path) == digest(path)
    assert hashed == ["a"]  # this process remembers it
    assert not Path("~").exists()


def test_few_entries_are_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST_KEPT", 3)
    digest(*(write(tmp_path / f"{i}", b"x") for i in range(5)))
    assert len(list(cache.iterdir())) == 3


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone cannot be read: No such file"):
        digest(tmp_path / "gone")
