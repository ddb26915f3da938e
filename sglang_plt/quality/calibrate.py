"""What ``sglang-plt calibrate`` decides: how many layers share a transform, and the step of the quantiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_plt.calibration.fit import step_for
from sglang_plt.calibration.make import SCALES, make_profile
from sglang_plt.codec import Profile, ProfileInfo
from sglang_plt.quality.collect import CONTINUATION, Collection
from sglang_plt.quality.kl import measure
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.texts import Window

SENSITIVITY_WINDOWS = 12
"""Windows at the front that sensitivities are measured on, too."""
CHECK_WINDOWS = 6
"""Windows that the step is corrected on; nothing else is fitted to them."""


def fit_profile(
    info: ProfileInfo,
    collection: Collection,
    divergence: float,
    model: ReferenceModel,
    windows: Sequence[Window],
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """The profile with which its codec moves next-token distributions by ``divergence`` nats on ``windows``.

    A first fit takes the step that the sensitivities promise; its divergence is measured, and the second corrects the
    step by what was missed, which the second order leaves out.
    """
    step, context = step_for(divergence, info.num_layers, info.width), len(windows[0].ids) - CONTINUATION
    for attempt in range(2):
        made = replace(info, step=step, scale=SCALES[info.codec])
        profile = make_profile(made, collection.moments, collection.fisher.of_layers)
        samples = measure(model, windows, context, [info.codec], profiles={info.codec: profile})
        found, bits = (sum(getattr(sample, name) for sample in samples) / len(samples) for name in ("kl", "bits"))
        say(f"{info.codec}: KL {found:.5f}, {bits:.3f} bits a value on {len(windows)} windows")
        if attempt == 0:
            step *= min(2.0, max(0.5, (divergence / found) ** 0.5))
    return profile
