"""How far a model's answers move when its prefix KV comes out of a codec instead of a prefill."""

from __future__ import annotations


class QualityError(ValueError):
    """The measurement cannot be made as asked; the message is one line that says what was found and what to do."""


PROFILE_DIVERGENCE = 0.0014
"""Nats a token that profiles are fitted to, if nothing else is asked for."""
