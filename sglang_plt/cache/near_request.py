"""What near-miss reuse knows of a request, and what it may give it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_plt.keys import is_near_miss, make_namespace
from sglang_plt.near_miss import Span

OFF, REPORT, ON = "off", "report", "on"
MODES = (OFF, REPORT, ON)
STATE = "plt_near_miss"
"""Attribute of a request, and key of its ``custom_params``."""


@dataclass
class NearRequest:
    """What a request carries while it runs.

    Attributes:
        mode: one of :data:`MODES`.
        planned_at: tokens it had when its spans were looked for; -1 before.
        spans: still to be filled.
        donor, tokens: whom from: its number and its tokens.
        waits: scheduling passes it let go by.
        prefix: whether its cached prefix holds reused rows.
        owned_from: rows from here on are its own until it ends; -1 where all it has computed is in the trie.
        grafted: tokens reused, for the response.
    """

    mode: str = OFF
    planned_at: int = -1
    spans: list[Span] = field(default_factory=list)
    donor: int = 0
    tokens: np.ndarray | None = None
    waits: int = 0
    prefix: bool = False
    owned_from: int = -1
    grafted: int = 0


def state_of(req: Any) -> NearRequest | None:
    """The state of a request that was matched."""
    return getattr(req, STATE, None)


def asked_mode(req: Any) -> Any:
    """What a request asks for, one of :data:`MODES` or something unknown; None where it does not."""
    params = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    return params.get(STATE) if isinstance(params, dict) else None


def last_to_reuse(req: Any) -> int:
    """Where the tokens of a request begin whose log-probabilities it wants, one by one."""
    wanted = getattr(req, "return_logprob", False) and req.logprob_start_len >= 0
    length = len(req.full_untruncated_fill_ids)
    return min(req.logprob_start_len, length) if wanted else length


def may_reuse(req: Any) -> bool:
    """Whether a request asks for nothing that tokens without a forward pass of their own do not give."""
    return not (getattr(req, "return_hidden_states", False) or getattr(req, "is_retracted", False) or not may_give(req))


def may_give(req: Any) -> bool:
    """Whether the rows of a request follow from its tokens."""
    return (
        getattr(req, "input_embeds", None) is None
        and getattr(req, "multimodal_inputs", None) is None
        and getattr(req, "positional_embed_overrides", None) is None
        and not getattr(req, "skip_radix_cache_insert", False)
        and not is_near_miss(make_namespace(req.extra_key, req.cache_salt))
    )
