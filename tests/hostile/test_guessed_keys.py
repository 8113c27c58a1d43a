"""Keys that are guessed: how long a refusal takes tells nothing, and a guess is never near."""

import hmac
from pathlib import Path

import pytest

from guerdon.errors import Unauthenticated
from guerdon.server import auth
from guerdon.settings.access import AccessConfig

KEYS = {name: name[0] * 32 for name in ("first", "second", "third")}


def test_every_key_is_compared_to_its_end_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"score {name} {key}\n" for name, key in KEYS.items()))
    access = auth.Access(AccessConfig(api_keys_file=str(path)))
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    class Watched:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Watched)
    near = [KEYS["first"][:-1], KEYS["first"] + "x", KEYS["first"].upper(), KEYS["first"][:-1] + "x", "", "x" * 100_000]
    for key in (*KEYS.values(), *near):
        compared.clear()
        try:
            access.caller(f"Bearer {key}")
            is_known = True
        except Unauthenticated:
            is_known = False
        assert is_known == (key in KEYS.values())
        # All keys, and of each a digest of the same length, however long the guess is.
        assert compared == [(32, 32)] * len(KEYS)
