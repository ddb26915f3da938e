"""How far next-token distributions behind a restored prefix are from exact ones, by what a server tells of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_plt.client import Client

Tops = list[dict[int, float]]
"""For every position the most probable tokens: id -> natural log of the probability."""

TOP_K = 20
_TINY = 1e-9


def teacher_forced(
    client: Client,
    prefix: Sequence[int],
    continuation: Sequence[int],
    top_k: int = TOP_K,
    custom_params: Mapping[str, str] | None = None,
) -> Tops:
    """Distributions behind each token of ``continuation``; ``prefix`` may come from the cache, the rest is computed.

    Args:
        custom_params: what the request asks of the cache.

    Returns:
        ``len(continuation)`` of them, with ``top_k`` tokens each.

    Raises:
        RequestError, OSError: as of the client.
    """
    meta = client.post_json(
        "/generate",
        {
            "input_ids": [*prefix, *continuation],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 1,
                "ignore_eos": True,
                "custom_params": dict(custom_params or {}),
            },
            "return_logprob": True,
            "logprob_start_len": len(prefix),
            "top_logprobs_num": top_k,
        },
    )["meta_info"]
    # of the first position nothing is known: what predicts it is the last token of the prefix
    found = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    assert len(found) == len(continuation), (len(found), len(continuation))
    return [{entry[1]: entry[0] for entry in position} for position in found]


def kl_lower_bound(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """A lower bound of ``KL(exact || other)`` in nats: tokens that both list, and all others as one bucket.

    Merging outcomes never makes a divergence larger, so the divergence over the whole vocabulary is at least this.

    Args:
        exact, other: token id -> natural log of its probability.
    """
    both = exact.keys() & other.keys()
    total = sum(math.exp(exact[token]) * (exact[token] - other[token]) for token in both)
    rest_p = 1 - sum(math.exp(exact[token]) for token in both)
    rest_q = 1 - sum(math.exp(other[token]) for token in both)
    if rest_p > _TINY:  # below is rounding
        total += rest_p * math.log(rest_p / max(rest_q, _TINY))
    return max(0.0, total)


def mean_kl(exact: Tops, other: Tops) -> float:
    """Mean of :func:`kl_lower_bound` over positions, which must be the same ones."""
    return sum(kl_lower_bound(p, q) for p, q in zip(exact, other, strict=True)) / len(exact)
