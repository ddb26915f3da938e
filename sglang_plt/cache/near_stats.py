"""What near-miss reuse counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_plt.near_miss import Refusal


@dataclass
class NearMissStats:
    """Totals since the start of the process.

    Attributes:
        requests: that were given rows of a donor.
        grafts: spans of them.
        tokens: of these spans.
        planned_tokens: that could have been given; more than ``tokens`` where that is only reported.
        published: requests whose rows were kept.
        refusals: plans that came to nothing, by reason.
        reported: spans that were compared with computed rows.
        observer: receives every deviation of these.
    """

    requests: int = 0
    grafts: int = 0
    tokens: int = 0
    planned_tokens: int = 0
    published: int = 0
    reported: int = 0
    refusals: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Refusal})
    observer: Callable[[float], None] | None = field(default=None, repr=False)

    def report(self, deviation: float) -> None:
        """Count a span whose rows were compared."""
        self.reported += 1
        if self.observer is not None:
            self.observer(deviation)
