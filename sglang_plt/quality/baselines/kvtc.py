"""A stand-in for KVTC: principal components of several layers, one uniform step, entropy coding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_plt.codec import BLOCK_TOKENS, EXACT_TOKENS
from sglang_plt.codec.entropy import encode_numbers, pad_to_bands
from sglang_plt.codec.profile import QuantisedMatrix, unit_layers
from sglang_plt.quality.baselines.base import Baseline, matrix_bytes
from sglang_plt.quality.baselines.statistics import GROUP, Statistics


@dataclass(frozen=True)
class Components:
    """Principal components of the keys or values of a few layers: ``vectors`` ``[n, n]``, one a row; float64."""

    layers: range
    kind: int
    mean: torch.Tensor
    variances: torch.Tensor
    vectors: torch.Tensor


def principal_components(statistics: Statistics) -> list[Components]:
    """Of :data:`GROUP` layers each, keys and values apart."""
    found = []
    for layers in unit_layers(statistics.layout.num_layers, GROUP):
        _, mean, _, _, covariance = statistics.moments.covariances(layers)
        for kind, name in enumerate(("keys", "values")):
            columns = statistics.columns(name, len(layers))
            variances, vectors = torch.linalg.eigh(covariance[columns][:, columns])
            found.append(Components(layers, kind, mean[columns], variances.flip(0).clamp_min(1e-30), vectors.flip(1).T))
    return found


class Kvtc(Baseline):
    """KV cache transform coding, arXiv 2511.01815: least squared error, keys and values of 6 layers apart.

    Bits of a component follow from its variance by reverse water-filling, as the paper's search for them does, it is
    rounded, and our entropy coder takes the place of DEFLATE, which codes the same integers in more bytes.

    Args:
        nominal_bits: a number, of a Gaussian source with the components' variances; sets the step.
    """

    method = "kvtc"

    def __init__(self, statistics: Statistics, components: Sequence[Components], nominal_bits: float) -> None:
        super().__init__(statistics.layout, nominal_bits)
        step = _step_of(torch.cat([unit.variances for unit in components]), nominal_bits)
        self._units = []
        for unit in components:
            stored = QuantisedMatrix.of(step * unit.vectors)
            basis = stored.dense()
            analysis = torch.linalg.inv(basis.double()).float()
            self._units.append((unit.layers, unit.kind, unit.mean.float(), basis, analysis))
            self.profile_bytes += matrix_bytes(stored) + 4 * len(unit.mean)

    def _through(self, layers: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        rows = [torch.empty_like(layer) for layer in layers]
        num_bits, start, count = 0, 0, len(layers[0])
        while start < count:
            stop = min(count, start + BLOCK_TOKENS - (start + EXACT_TOKENS) % BLOCK_TOKENS)  # blocks as ours
            stored = []
            for unit, kind, mean, basis, analysis in self._units:
                x = torch.cat([self._kinds(layers[layer][start:stop])[kind] for layer in unit], 1)
                kept = ((x - mean) @ analysis).round()
                stored.append(pad_to_bands(kept.T.to(torch.int16).numpy()))
                for layer, part in zip(unit, torch.addmm(mean, kept, basis).chunk(len(unit), 1), strict=True):
                    self._kinds(rows[layer][start:stop])[kind].copy_(part)
            num_bits += 8 * len(encode_numbers(np.concatenate(stored)))
            start = stop
        return rows, num_bits


def _step_of(variances: torch.Tensor, nominal_bits: float) -> float:
    """The step whose error, step**2 / 12 in every component, leaves ``nominal_bits`` a component on average."""
    low, high = float(variances.min().log2()) - 32, float(variances.max().log2())
    for _ in range(60):
        level = (low + high) / 2
        found = float((variances.log2() - level).clamp_min(0).mean()) / 2
        low, high = (level, high) if found > nominal_bits else (low, level)
    return float(12 * 2.0**high) ** 0.5
