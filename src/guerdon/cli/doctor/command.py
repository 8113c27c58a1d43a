"""`guerdon doctor`: its flags, what it examines in turn, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

import orjson

from guerdon.cli.doctor import devices, installation, machine, server
from guerdon.cli.doctor.findings import Finding, line
from guerdon.errors import Exit


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("URL", nargs="*", help="servers to look at, too: http:// or grpc:// addresses")
    parser.add_argument("--json", action="store_true", help="write what was found as JSON")


def run(args: argparse.Namespace) -> int:
    """Tells every finding as it comes, and how many problems there are; returns 1 where there is one."""
    found = []
    for finding in _examined(args.URL):
        found.append(finding)
        if not args.json:
            sys.stdout.write(line(finding, sys.stdout))
            sys.stdout.flush()
    problems = sum(finding.level == "problem" for finding in found)
    if args.json:
        told = {"problems": problems, "findings": [asdict(finding) for finding in found]}
        sys.stdout.write(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
    else:
        count = {0: "no problem", 1: "1 problem"}.get(problems, f"{problems} problems")
        notes = sum(finding.level == "note" for finding in found)
        sys.stdout.write(f"\n{count}, {notes} {'note' if notes == 1 else 'notes'}\n")
    return Exit.FAILED if problems else Exit.DONE


def _examined(urls: list[str]) -> Iterator[Finding]:
    """The servers that were asked about first; then this machine, what is quickest first."""
    for url in urls:
        yield from server.examine(url)
    yield from installation.examine()
    yield from machine.examine()
    yield from devices.examine()
