"""Bits against divergence: every arm on the same rows of the same text, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_plt.codec import EncodeError
from sglang_plt.quality import QualityError
from sglang_plt.quality.arms import Arm, Prefix
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.texts import Window
from triton_ops.rotated import NotEncodable

PROFILE_TOKENS = 1_000_000
"""Tokens that share the bytes of a profile."""
_CHUNK = 32  # tokens whose distributions are held in float64 at once


@dataclass(frozen=True)
class Sample:
    """One arm on one window.

    Attributes:
        kl: nats, mean over the tokens of the continuation.
        top1: share of them whose most probable next token stays the same.
        log_ppl: logarithm of the ratio of perplexities, restored over exact.
        bits: of everything that is stored for the prefix, a KV number, ``profile_bits`` included.
        profile_bits: of the profile, a KV number, shared by :data:`PROFILE_TOKENS`.
        values: KV numbers of a token.
    """

    arm: str
    context: int
    kind: str
    kl: float
    top1: float
    log_ppl: float
    bits: float
    profile_bits: float
    values: int


class Continuation:
    """Next-token distributions behind exact rows; others are held against them, in float64.

    Args:
        logits: ``[tokens, vocabulary]`` after each of ``ids``.
        ids: tokens of the continuation, at least two.
    """

    def __init__(self, logits: torch.Tensor, ids: Sequence[int]) -> None:
        self.log_p = torch.log_softmax(logits.double(), dim=-1)
        self.best = logits.argmax(-1)
        self.following = torch.tensor(ids[1:])
        self.surprise = self._surprise(self.log_p)

    def _surprise(self, log_p: torch.Tensor) -> float:
        return -float(log_p[: len(self.following)].gather(1, self.following[:, None]).mean())

    def compare(self, logits: torch.Tensor) -> tuple[float, float, float]:
        """``(KL(exact || other), top-1 agreement, logarithm of the ratio of perplexities)``."""
        total, log_q = 0.0, torch.empty(len(self.following), dtype=torch.float64)
        for start in range(0, len(logits), _CHUNK):
            part = torch.log_softmax(logits[start : start + _CHUNK].double(), dim=-1)
            exact = self.log_p[start : start + len(part)]
            total += float((exact.exp() * (exact - part)).sum())
            following = self.following[start : start + len(part)]
            log_q[start : start + len(following)] = part[: len(following)].gather(1, following[:, None])[:, 0]
        same = float((self.best == logits.argmax(-1)).double().mean())
        return total / len(logits), same, -float(log_q.mean()) - self.surprise


def measure(
    model: ReferenceModel,
    windows: Sequence[Window],
    context: int,
    arms: Sequence[Arm],
    on_window: Callable[[int, list[Sample]], None] = lambda index, samples: None,
) -> list[Sample]:
    """Run every arm on every window, whose first ``context`` tokens are the prefix; one prefill a window.

    Raises:
        QualityError: an arm cannot represent the model's rows.
    """
    rotary = model.rotary(context)
    samples = []
    for index, window in enumerate(windows):
        rows, tail = model.prefill(window.ids[:context]), window.ids[context:]
        prefix = Prefix(rows, rows.layers(rotary), rotary, index)
        exact = Continuation(model.continue_from(rows, tail), tail)
        values = rows.num_values // context
        found = []
        for arm in arms:
            try:
                restored, num_bits = arm.through(prefix)
            except (EncodeError, NotEncodable) as error:
                raise QualityError(
                    f"{arm.name} cannot hold rows of this model ({error}): leave it out with --codec"
                ) from error
            kl, top1, log_ppl = exact.compare(model.continue_from(restored, tail))
            profile_bits = 8 * arm.profile_bytes / PROFILE_TOKENS / values
            bits = num_bits / rows.num_values + profile_bits
            found.append(Sample(arm.name, context, window.kind, kl, top1, log_ppl, bits, profile_bits, values))
        samples += found
        on_window(index, found)
    return samples
