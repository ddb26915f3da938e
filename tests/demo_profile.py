"""A profile that few tokens made: as good as any for what is not a rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang_plt.calibration.identity import model_identity
from sglang_plt.calibration.make import SCALES, make_profile
from sglang_plt.codec import Profile, ProfileInfo
from sglang_plt.quality.collect import Collection, collect
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.texts import builtin_windows

STEP = 0.0014
"""Close to that of the experiments whose bounds tests hold; ``calibrate`` arrives at a larger one."""


def fit_profile(
    model: ReferenceModel, path: Path, state: Path, codec: str, count: int = 12, length: int = 640
) -> Profile:
    """The profile, of ``count`` windows; ``state`` is a file to write to meanwhile."""
    windows = builtin_windows(model.tokenizer, count, length, "calibration")
    info = ProfileInfo.open(
        codec, model_identity(path), model.layout, dtype="float32", keys_rotated=False, sensitivity="fisher"
    )
    collection = Collection(model.layout, info.group, "small")
    collect(model, windows, 8, collection, state)
    scale = SCALES["dense"] if codec == "dense" else 1.0  # errors as large as those of rounding to that step
    info = replace(info, step=STEP, scale=scale, tokens=collection.moments.count)
    return make_profile(info, collection.moments, collection.fisher.of_layers)
