"""Published methods as measurements, on the same rows and with the same exact tokens as our codecs.

A method is a few :class:`Baseline` of different rates. Bits count everything that a decoder of a sequence needs, save
what :attr:`Baseline.profile_bytes` counts; no headers or checksums are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_plt.codec import RowLayout
from sglang_plt.quality.baselines.aqua import Aqua
from sglang_plt.quality.baselines.base import Baseline
from sglang_plt.quality.baselines.groups import IntPerToken, Kivi
from sglang_plt.quality.baselines.kvtc import Kvtc, principal_components
from sglang_plt.quality.baselines.rotated import Rotated, RotatedFisher
from sglang_plt.quality.baselines.statistics import GROUP, Statistics

PLAIN: dict[str, Callable[[RowLayout], Sequence[Baseline]]] = {
    "int": lambda layout: [IntPerToken(layout, bits) for bits in (3, 4, 5, 6)],
    "kivi": lambda layout: [Kivi(layout, bits) for bits in (2, 3, 4, 5)],
    "rotated": lambda layout: [Rotated(layout, bits) for bits in (2, 3, 4, 5)],
}
"""Name of a method that needs no calibration -> its points, from few bits to many."""


def _kvtc(statistics: Statistics) -> list[Baseline]:
    components = principal_components(statistics)
    return [Kvtc(statistics, components, bits) for bits in (1.5, 2.25, 3.0)]


FITTED: dict[str, Callable[[Statistics], Sequence[Baseline]]] = {
    "rotated-fisher": lambda found: [RotatedFisher(found, bits) for bits in (3.0, 3.5, 4.0, 4.5)],
    "kvtc": _kvtc,
    "aqua": lambda found: [Aqua(found, bits) for bits in (2, 3, 4)],
}
"""Name of a method that does -> its points, from few bits to many."""

__all__ = ["FITTED", "GROUP", "PLAIN", "Baseline", "Statistics"]
