"""What is compared: our codecs through their own blocks, published methods through their numbers, at several rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from sglang_plt.calibration.identity import model_identity
from sglang_plt.calibration.make import make_profile
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec import CODECS, EXACT_TOKENS, PROFILED, Profile, ProfileInfo, Rotary, RowLayout, TokenEmbedding
from sglang_plt.codec.profile import default_group, default_token_layers
from sglang_plt.quality import PROFILE_DIVERGENCE, QualityError
from sglang_plt.quality.baselines import FITTED, GROUP, PLAIN, Baseline, Statistics
from sglang_plt.quality.calibrate import CHECK_WINDOWS, SENSITIVITY_WINDOWS, fit_profile
from sglang_plt.quality.collect import CONTINUATION, Collection, collect
from sglang_plt.quality.kl import through_codec
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import Window, builtin_windows

NAMES = (*CODECS, *PROFILED, *PLAIN, *FITTED)
"""What can be asked for."""
DIVERGENCE = 0.003
"""Nats a token that curves are read at."""
FACTORS = (1.7, 0.7)
"""Steps of the other points of a codec's curve, in steps of its profile; ``-tight`` codecs are points of it too."""
_TIGHTER = 0.5  # for a codec without one

_WINDOW = 1280
_MOST_MOMENTS = 1.5e9  # bytes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prefix:
    """The exact rows of a prefix, and the same without rotation, float32 ``[tokens, width]`` a layer."""

    rows: Rows
    layers: list[torch.Tensor]
    rotary: Rotary | None
    seed: int


@dataclass(frozen=True)
class Arm:
    """One method at one rate.

    Attributes:
        name: ``<method>``, or ``<method>@<rate>`` for a point that is there for the curve.
        profile_bytes: what encoder and decoder have at hand.
        through: a prefix to its rows as they come back, and the bits that were stored.
        profile: of a codec of ours that needs one.
        embedding: of the model, for it.
    """

    name: str
    profile_bytes: int
    through: Callable[[Prefix], tuple[Rows, int]]
    profile: Profile | None = None
    embedding: TokenEmbedding | None = None


def method_of(name: str) -> str:
    """The curve that an arm is a point of."""
    return name.partition("@")[0].removesuffix("-tight")


def codec_arm(
    codec: str, profile: Profile | None = None, point: str = "", embedding: TokenEmbedding | None = None
) -> Arm:
    """A codec of ours; headers and checksums of its blocks count."""

    def through(prefix: Prefix) -> tuple[Rows, int]:
        rows, num_bytes = through_codec(codec, prefix.rows, prefix.rotary, prefix.seed, profile, 0, embedding)
        return rows, 8 * num_bytes

    return Arm(codec + point, profile.num_bytes if profile is not None else 0, through, profile, embedding)


def baseline_arm(baseline: Baseline) -> Arm:
    """A published method."""

    def through(prefix: Prefix) -> tuple[Rows, int]:
        layers, num_bits = baseline.through(prefix.layers)
        return rows_of_layers(layers, prefix), num_bits

    return Arm(baseline.name, baseline.profile_bytes, through)


def rows_of_layers(layers: Sequence[torch.Tensor], prefix: Prefix) -> Rows:
    """Inverse of :meth:`Rows.layers`; the first four tokens are those of ``prefix``, bit for bit."""
    positions = torch.arange(EXACT_TOKENS, len(prefix.rows))
    keys, values = [], []
    for layer, key, value in zip(layers, prefix.rows.keys, prefix.rows.values, strict=True):
        rows, width = layer[EXACT_TOKENS:], key[0].numel()
        new = rows[:, :width].reshape(-1, *key.shape[1:])
        keys.append(
            torch.cat((key[:EXACT_TOKENS], new if prefix.rotary is None else prefix.rotary.apply(new, positions)))
        )
        values.append(torch.cat((value[:EXACT_TOKENS], rows[:, width:].reshape(-1, *value.shape[1:]))))
    return Rows(tuple(keys), tuple(values))


def make_arms(
    names: Sequence[str],
    model: ReferenceModel,
    path: Path,
    tokens: int,
    state: Path,
    given: Mapping[str, Profile],
    say: Say,
) -> list[Arm]:
    """The arms of ``names``, fitted to the calibration split where they need it.

    Args:
        path: of the model.
        tokens: calibration text.
        state: file that keeps the calibration pass; taken up again where it is there.
        given: profiles for codecs instead of new ones; other points of their curves are fitted all the same.

    Raises:
        QualityError: the model's rows are too wide for joint second moments.
    """
    layout = model.layout
    arms = [codec_arm(name) for name in CODECS if name in names]
    arms += [baseline_arm(found) for name, make in PLAIN.items() if name in names for found in make(layout)]
    if not set(names) & {*PROFILED, *FITTED}:
        return arms
    collection, checks = _collected(model, layout, path, tokens, state, say)
    for codec in dict.fromkeys(method_of(name) for name in names if name in PROFILED):
        profile = given.get(codec)
        if profile is None:
            say(f"fitting {codec}")
            info = _info(model, layout, path, codec, collection.moments.count)
            profile = fit_profile(info, collection, PROFILE_DIVERGENCE, model, checks, say)
        siblings = [name for name in PROFILED if method_of(name) == codec]
        arms += [codec_arm(name, profile, embedding=model.embedding) for name in siblings if name in names]
        if codec in names:
            for factor in FACTORS if len(siblings) > 1 else (*FACTORS, _TIGHTER):
                info = replace(profile.info, step=factor * profile.info.step)
                other = make_profile(info, collection.moments, collection.fisher.of_layers)
                arms.append(codec_arm(codec, other, f"@x{factor:g}", model.embedding))
    statistics = Statistics(layout, collection.moments, collection.fisher)
    for name, fit in FITTED.items():
        if name in names:
            say(f"fitting {name}")
            arms += [baseline_arm(found) for found in fit(statistics)]
    return arms


def _collected(
    model: ReferenceModel, layout: RowLayout, path: Path, tokens: int, state: Path, say: Say
) -> tuple[Collection, list[Window]]:
    """One pass over the calibration split, and windows of it that nothing is fitted to but the step."""
    width = layout.kv_heads * (layout.head_dim + layout.v_head_dim)
    hidden, token_layers = model.embedding.hidden, default_token_layers(layout, "dense", default_group(layout))
    size = Moments.num_bytes(layout.num_layers, width, GROUP, hidden, token_layers)
    if size > _MOST_MOMENTS:
        raise QualityError(
            f"second moments of {GROUP} layers of {width} channels take {size / 1e9:.1f} GB, the limit is "
            f"{_MOST_MOMENTS / 1e9:.1f}: give a model with narrower rows, or --codec with methods that need none"
        )
    length = min(_WINDOW, model.max_positions)
    if length < 2 * CONTINUATION:
        raise QualityError(
            f"the model has {length} positions, calibration needs {2 * CONTINUATION}: give another model"
        )
    count = -(-tokens // length)
    windows = builtin_windows(model.tokenizer, count + CHECK_WINDOWS, length, "calibration")
    key = f"rate-distortion {model_identity(path)} {tokens} {length} {GROUP} {hidden} {token_layers}"
    collection = Collection(layout, GROUP, key, hidden, token_layers)
    if collection.resume(state):
        say(f"calibration: {collection.done} of {count} windows taken up from {state}")
    started = collection.done
    collect(model, windows[:count], SENSITIVITY_WINDOWS, collection, state, partial(_progress, say, count))
    if collection.done > started:
        collection.save(state)
    return collection, windows[count:]


def _progress(say: Say, count: int, done: int) -> None:
    if done % 10 == 0 or done == count:
        say(f"calibration: {done} of {count} windows")


def _info(model: ReferenceModel, layout: RowLayout, path: Path, codec: str, tokens: int) -> ProfileInfo:
    return ProfileInfo.open(
        codec,
        model_identity(path),
        layout,
        dtype=model.dtype,
        keys_rotated=model.rotary(_WINDOW) is None,
        tokens=tokens,
        sensitivity="fisher",
        hidden=model.embedding.hidden,
    )
