"""The model's own probability of an answer, where its request asked for log-probabilities anyway."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_plt.probability import BIT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_PER_NAT = BIT / math.log(2)
_LEAST = -10_000.0  # nats; an impossible token is that improbable


def model_bits(req: Req) -> Callable[[int, int], int | None] | None:
    """``(start, stop)`` -> ``-log2 P`` of those positions in units of ``1 / BIT``; None where one is not known.

    Only tokens that the model generated are known. Ranks agree on the values as they agree on the tokens: both come
    from the same gathered logits. None where the request did not ask for log-probabilities.
    """
    if not getattr(req, "return_logprob", False):
        return None
    values = req.logprob.output_token_logprobs_val or ()
    first = len(req.origin_input_ids)

    def read(start: int, stop: int) -> int | None:
        known = values[max(0, start - first) : max(0, stop - first)]
        if start < first or len(known) < stop - start or not all(isinstance(value, float) for value in known):
            return None
        return sum(int(-_PER_NAT * (value if value > _LEAST else _LEAST)) for value in known)

    return read
