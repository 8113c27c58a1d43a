"""Keys of all roles, and servers that need them, for the tests of access."""

from pathlib import Path

from guerdon.settings.config import ServerConfig

SCORE = "score-key-0123456789abcdef"
TRAIN = "train-key-0123456789abcdef"
ADMIN = "admin-key-0123456789abcdef"
KEYS = {"score": SCORE, "train": TRAIN, "admin": ADMIN}


def keyed(folder: Path, **settings: object) -> ServerConfig:
    """A server's settings with a file of one key a role, whose holders are scorer, trainer and keeper."""
    path = folder / "keys"
    path.write_text(f"# role name key\nscore scorer {SCORE}\ntrain trainer {TRAIN}\n\nadmin keeper {ADMIN}\n")
    return ServerConfig(**{"port": 0, "grpc_port": 0, "api_keys_file": str(path), **settings})  # type: ignore[arg-type]


def bearer(key: str) -> dict[str, str]:
    """The header that shows the key."""
    return {"Authorization": f"Bearer {key}"}
