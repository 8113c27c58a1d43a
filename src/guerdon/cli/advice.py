"""What to do about an error that a command ends with, where the error itself does not say."""

from __future__ import annotations

from guerdon import errors
from guerdon.errors import GuerdonError

_ADVICE: dict[type[GuerdonError], str] = {
    errors.UnknownModel: "`guerdon doctor URL` lists what a server has",
    errors.InvalidRequest: "correct what is named above; the same again would fail again",
    errors.Unauthenticated: "set GUERDON_API_KEY to a key that the server knows",
    errors.Forbidden: "set GUERDON_API_KEY to a key whose role allows it",
    errors.RouteNotFound: "check the URL: it is that of the server, without a path",
    errors.PayloadTooLarge: "send less at once, or give the server more --max-body-mb",
    errors.SampleFailed: "the server's log has the cause",
    errors.ServerFault: "the server's log has the cause; with its --log-level debug, more of it",
    errors.Unsupported: "`guerdon doctor URL` tells what that server is",
    errors.Unreachable: "check that the server runs and the URL is its own: `guerdon doctor URL` tries it",
    errors.RanksLost: "the same command again starts all ranks, and goes on from what was saved",
    errors.Offloaded: "have whoever offloaded the critic send `onload`",
    errors.Overloaded: "try again when the server has less to do, or share the load between several",
    errors.Unavailable: "try again when the server is ready: `guerdon doctor URL` tells",
    errors.StorageFailed: "make room, or give a folder of another disk; the same command then goes on",
    errors.CriticReset: "start the run again from its newest checkpoint, or from one of both that fit",
    errors.RunFailed: "mend what is named above; the same command goes on from the newest checkpoint",
    errors.DeadlineExceeded: "see with `guerdon doctor URL` whether the server is ready; it may have too much to do",
    GuerdonError: "the same command again goes on where it stopped, once the cause is gone",
}


def help_for(error: GuerdonError) -> str:
    """One line on what to do: that of the nearest class which has one."""
    return next(_ADVICE[cls] for cls in type(error).__mro__ if cls in _ADVICE)
