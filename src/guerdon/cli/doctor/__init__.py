"""`guerdon doctor`: what is installed, what the machine has, what a server answers, and what to do about it."""

from guerdon.cli.doctor.command import add, run

__all__ = ["add", "run"]
