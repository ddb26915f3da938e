"""What ``sglang-plt calibrate`` decides: how many layers share a transform, and the step of the quantiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_plt.calibration.fit import step_for
from sglang_plt.calibration.make import make_profile
from sglang_plt.codec import Profile, ProfileInfo, RowLayout
from sglang_plt.quality.collect import CONTINUATION, Collection
from sglang_plt.quality.kl import measure
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.texts import Window

_WIDE = 512
"""Rows of more channels than this take a transform a layer: joint ones grow with the square of what they span."""


def default_group(layout: RowLayout) -> int:
    """Layers of a unit: 3 for narrow rows, where more are cheap and save a fifth of the bits, else 1."""
    return 3 if layout.kv_heads * (layout.head_dim + layout.v_head_dim) <= _WIDE else 1


def fit_profile(
    info: ProfileInfo,
    collection: Collection,
    divergence: float,
    model: ReferenceModel,
    windows: Sequence[Window],
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """The profile with which ``dense`` moves next-token distributions by ``divergence`` nats on ``windows``.

    A first fit takes the step that the sensitivities promise; its divergence is measured, and the second corrects the
    step by what was missed, which the second order leaves out.
    """
    step = step_for(divergence, info.num_layers, info.width)
    for attempt in range(2):
        profile = make_profile(replace(info, step=step), collection.moments, collection.fisher.of_layers)
        context = len(windows[0].ids) - CONTINUATION
        samples = measure(model, windows, context, ["dense"], profile=profile)
        found = sum(sample.kl for sample in samples) / len(samples)
        bits = sum(sample.bits for sample in samples) / len(samples)
        say(f"step {step:.3g}: KL {found:.5f}, {bits:.3f} bits a value on {len(windows)} windows")
        if attempt == 0:
            step *= min(2.0, max(0.5, (divergence / found) ** 0.5))
    return profile
