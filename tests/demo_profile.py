"""A profile of the demo model that few tokens made: as good as any for what is not a rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang_plt.calibration.identity import model_identity
from sglang_plt.calibration.make import make_profile
from sglang_plt.codec import Profile, ProfileInfo
from sglang_plt.quality.collect import Collection, collect
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.texts import builtin_windows

STEP = 0.0019
"""What ``calibrate`` arrives at for a divergence of 0.0015 nats."""
_WINDOWS, _LENGTH, _SENSITIVITY = 9, 960, 6


def fit_profile(model: ReferenceModel, path: Path, state: Path, codec: str) -> Profile:
    """The profile; ``state`` is a file to write to meanwhile."""
    windows = builtin_windows(model.tokenizer, _WINDOWS, _LENGTH, "calibration")
    info = ProfileInfo.open(
        codec, model_identity(path), model.layout, dtype="float32", keys_rotated=False, sensitivity="fisher"
    )
    collection = Collection(model.layout, info.group, "small")
    collect(model, windows, _SENSITIVITY, collection, state)
    info = replace(info, step=STEP, tokens=collection.moments.count)
    return make_profile(info, collection.moments, collection.fisher.of_layers)


def save_profile(path: Path, directory: Path, codec: str) -> Path:
    """The file of a profile for a server of the model in ``path``."""
    file = directory / f"{codec}.safetensors"
    fit_profile(ReferenceModel(path), path, directory / "state", codec).save(file)
    return file
