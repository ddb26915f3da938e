"""Finds the profiles of a model for what is measured without a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from sglang_plt.calibration.identity import find_profile, model_identity
from sglang_plt.codec import Profile, load_profile
from sglang_plt.codec.rows import RowLayout
from sglang_plt.quality.model import ReferenceModel


def load_profiles(
    path: Path, model: ReferenceModel, codecs: Iterable[str], where: Path | None = None
) -> dict[str, Profile]:
    """The profiles of those ``codecs`` that have one.

    Args:
        path: of the model.
        where: a profile, or a directory of them; None is where servers look.

    Raises:
        ProfileError: a file is not a profile, or of another model.
    """
    identity, layout, rotated = model_identity(path), model.layout, model.rotary(2) is None
    found = {}
    for codec in codecs:
        fitted_for = codec.removesuffix("-tight")
        file = find_profile(fitted_for, identity, model.dtype, where)
        if file is None:
            continue
        profile = load_profile(file)
        kind = fitted_for
        if where == file:  # one file was named: it may be of another codec, and made without prediction
            if profile.info.codec != fitted_for:
                continue
            kind = profile.info.kind
        profile.info.check(kind, _as_served(layout, profile), identity, rotated)
        found[codec] = profile
    return found


def _as_served(layout: RowLayout, profile: Profile) -> RowLayout:
    """The layout with the pool type that the profile is for: rows are measured in float32 whatever a server keeps."""
    return replace(layout, dtype=getattr(torch, profile.info.dtype, layout.dtype))
