"""Environments of a user's own, as module:function, for the tests of the actors."""

from typing import Any

TOOL = " tea inn"
"""What `twice` answers."""


def twice(prompt: str, response: str) -> str | None:
    """Answers twice, and then ends the response."""
    assert prompt
    return TOOL if response.count(TOOL) < 2 else None


def silent(prompt: str, response: str) -> str:
    """Appends nothing, and lets the policy go on."""
    return ""


def endless(prompt: str, response: str) -> str:
    """Answers with more than any response of a test may have."""
    return TOOL * 50


def broken(prompt: str, response: str) -> str:
    """Fails as a user's function may."""
    raise KeyError("no such tool")


def numeric(prompt: str, response: str) -> Any:
    """Returns what is no text."""
    return 5
