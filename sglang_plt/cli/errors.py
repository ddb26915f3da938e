"""The one kind of error that a command shows without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: the message is one line that says what was found and what to do."""


def no_profile(codec: str) -> UserError:
    """A codec was asked for that has no profile of the model."""
    fitted_for = codec.removesuffix("-tight")
    return UserError(f"--codec={codec} needs a profile: make one with sglang-plt calibrate --codec {fitted_for}")
