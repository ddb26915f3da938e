"""Samples to rows: means over windows, and the bits at which a method reaches a divergence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sglang_plt.quality.arms import DIVERGENCE, method_of
from sglang_plt.quality.rate_distortion import Sample
from sglang_plt.results import Row

BITS_AT = f"bits_at_kl_{DIVERGENCE:g}"
_DRAWS = 2000
_LEAST = 1e-12  # nats; the logarithm of an exact arm

_METRICS = (
    ("bits_per_value", "bits", "bits"),
    ("profile_bits_per_value", "profile_bits", "bits"),
    ("kl", "kl", "nats"),
    ("top1_agreement", "top1", "1"),
)


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Means with a bootstrap interval of 95 % over windows; arms are ``codec/context/domain``, ``all`` for every one.

    ``bits_at_kl_0.003`` has the same arms, without rates, where a method has points on both sides of that divergence.
    """
    arms: dict[tuple[str, int, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        for kind in dict.fromkeys((sample.kind, "all")):
            arms[sample.arm, sample.context, kind].append(sample)
    rows = []
    for (arm, context, kind), found in sorted(arms.items(), key=lambda item: (item[0][1], item[0][2] != "all")):
        name = f"{arm}/{context}/{kind}"
        for metric, field, unit in _METRICS:
            rows.append(_mean(metric, name, [getattr(sample, field) for sample in found], unit))
        rows.append(_mean("bits_per_token", name, [sample.bits * sample.values for sample in found], "bits"))
        log_ppl = _mean("ppl_ratio", name, [sample.log_ppl for sample in found], "1")
        lo, hi = (None if end is None else float(np.exp(end)) for end in (log_ppl.lo, log_ppl.hi))
        rows.append(Row("ppl_ratio", name, float(np.exp(log_ppl.value)), "1", lo, hi, len(found)))
    curves: dict[tuple[str, int, str], list[list[Sample]]] = defaultdict(list)
    for (arm, context, kind), found in arms.items():
        curves[method_of(arm), context, kind].append(found)
    for (method, context, kind), points in curves.items():
        row = _bits_at_target(f"{method}/{context}/{kind}", points)
        if row is not None:
            rows.append(row)
    return rows


def bits_at(bits: np.ndarray, kl: np.ndarray, target: float) -> np.ndarray:
    """Where curves pass ``target``, with log KL linear in bits between points, and beyond the last ones.

    Args:
        bits, kl: ``[draws, points]``, at least two points.
    """
    order = np.argsort(bits, axis=1)
    bits, log_kl = np.take_along_axis(bits, order, 1), np.log(np.maximum(np.take_along_axis(kl, order, 1), _LEAST))
    above = log_kl > np.log(target)
    first = np.clip(np.where(above.any(1), bits.shape[1] - 1 - above[:, ::-1].argmax(1), 0), 0, bits.shape[1] - 2)
    pick = np.arange(len(bits))
    slope = (log_kl[pick, first + 1] - log_kl[pick, first]) / (bits[pick, first + 1] - bits[pick, first])
    return bits[pick, first] + (np.log(target) - log_kl[pick, first]) / slope


def interval(estimates: np.ndarray) -> tuple[float, float]:
    """95 % of draws."""
    return float(np.percentile(estimates, 2.5)), float(np.percentile(estimates, 97.5))


def _draws(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, count, (_DRAWS, count))


def _mean(metric: str, arm: str, numbers: Sequence[float], unit: str) -> Row:
    values = np.array(numbers)
    lo, hi = interval(values[_draws(len(values))].mean(1)) if len(values) > 1 else (None, None)
    return Row(metric, arm, float(values.mean()), unit, lo, hi, len(values))


def _bits_at_target(arm: str, points: Sequence[Sequence[Sample]]) -> Row | None:
    bits = np.array([[sample.bits for sample in point] for point in points])  # [points, windows]
    kl = np.array([[sample.kl for sample in point] for point in points])
    means, sizes = kl.mean(1), bits.mean(1)
    if len(points) < 2 or means[sizes.argmax()] > DIVERGENCE or means.max() < DIVERGENCE:
        return None
    value = bits_at(sizes[None], means[None], DIVERGENCE)[0]
    count = bits.shape[1]
    if count == 1:
        return Row(BITS_AT, arm, float(value), "bits")
    draws = _draws(count)
    found = bits_at(bits[:, draws].mean(2).T, kl[:, draws].mean(2).T, DIVERGENCE)
    lo, hi = interval(found[np.isfinite(found)])
    return Row(BITS_AT, arm, float(value), "bits", lo, hi, count)


def table(rows: Sequence[Row]) -> str:
    """One line an arm and context, and the bits at the divergence of the target by domain."""
    found = {(row.metric, row.arm): row for row in rows}
    arms = dict.fromkeys(row.arm for row in rows if row.metric == "kl" and row.arm.endswith("/all"))
    lines = [f"{'arm':28}{'bits/value':>11}{'(profile)':>10}{'KL, nats [95 %]':>36}{'top-1':>9}{'ppl':>9}{'n':>4}"]
    for arm in arms:
        bits, profile, kl, top1, ppl = (
            found[metric, arm]
            for metric in ("bits_per_value", "profile_bits_per_value", "kl", "top1_agreement", "ppl_ratio")
        )
        ends = "" if kl.lo is None else f" [{kl.lo:.6f}, {kl.hi:.6f}]"
        lines.append(
            f"{arm.removesuffix('/all'):28}{bits.value:>11.3f}{profile.value:>10.4f}{f'{kl.value:.6f}{ends}':>36}"
            f"{100 * top1.value:>8.2f}%{ppl.value:>9.4f}{kl.n:>4}"
        )
    reached = [arm.removesuffix("/all") for metric, arm in found if metric == BITS_AT and arm.endswith("/all")]
    kinds = dict.fromkeys(row.arm.split("/")[2] for row in rows if row.metric == "kl")
    kinds.pop("all", None)
    if reached:
        lines += [
            "",
            f"{f'bits a value at KL {DIVERGENCE:g}':28}{'all [95 %]':>24}" + "".join(f"{k:>8}" for k in kinds),
        ]
    for arm in sorted(reached, key=lambda arm: (int(arm.split("/")[1]), found[BITS_AT, f"{arm}/all"].value)):
        row, cells = found[BITS_AT, f"{arm}/all"], [found.get((BITS_AT, f"{arm}/{kind}")) for kind in kinds]
        ends = "" if row.lo is None else f" [{row.lo:.3f}, {row.hi:.3f}]"
        by_kind = "".join(f"{'-' if cell is None else f'{cell.value:.3f}':>8}" for cell in cells)
        lines.append(f"{arm:28}{f'{row.value:.3f}{ends}':>24}{by_kind}")
    return "\n".join(lines)
