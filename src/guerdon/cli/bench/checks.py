"""What is refused before anything is sent: options without an effect, files that cannot be written, malformed URLs."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from guerdon.cli.bench.flags import SHAPE
from guerdon.client.addresses import Address, addresses
from guerdon.errors import ConfigError, InvalidRequest, StartError, install_command


def check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError where an option is given that changes nothing beside the others."""
    if args.data is None:
        if args.template:
            raise ConfigError("--template is given, and --data is not", "leave it out, or give rows with --data")
        return
    unused = [name for name in SHAPE if getattr(args, name) is not None]
    if args.seed is not None and args.rate is None:
        unused.append("seed")
    if unused:
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(
            f"{flags} {'is' if len(unused) == 1 else 'are'} of the random load, and --data takes its place",
            "leave out the one or the other",
        )


def check_files(args: argparse.Namespace) -> None:
    """Raises StartError where what is asked for cannot be written: before the load, not behind it."""
    if args.plot:
        if find_spec("matplotlib") is None:
            raise StartError("matplotlib is not installed, which --plot needs", install_command("plot"))
        if Path(args.plot).suffix.lower() != ".png":
            raise ConfigError(f"--plot {args.plot} is no PNG", "give a name that ends in .png")
    for path in (Path(name) for name in (args.json, args.plot) if name and name != "-"):
        _check_writable(path)


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} to write {path.name} into", "make it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", "give the name of a file in it")
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # whoever reads a pipe would take its opening and closing for the end
    try:
        path.open("ab").close()
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}", "give the name of a file that can be written") from e
    if is_new:
        path.unlink()


def servers(urls: list[str]) -> list[Address]:
    """The servers' addresses; raises ConfigError where a URL is none."""
    try:
        return addresses(urls, None)
    except InvalidRequest as e:
        raise ConfigError(str(e), "give each URL as its server said when it was ready") from e
