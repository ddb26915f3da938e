"""AQUA-KV's idea: keys and values predicted from what the decoder has, the rest through ``rotated``."""

from __future__ import annotations

import torch

from sglang_plt.codec.profile import QuantisedMatrix
from sglang_plt.quality.baselines.base import Baseline, matrix_bytes
from sglang_plt.quality.baselines.rotated import quantise
from sglang_plt.quality.baselines.statistics import Part, Statistics
from triton_ops.rotated.levels import DISTORTION

_RIDGE = 1e-5


class Aqua(Baseline):
    """AQUA-KV, arXiv 2501.19392: K from the reconstructed K below, V from the reconstructed K here and V below.

    The predictors are least-squares fits to inputs with the quantiser's error, white within a head; the published
    method fits them to quantised rows, and its quantiser is another one.
    """

    method = "aqua"

    def __init__(self, statistics: Statistics, bits: int) -> None:
        super().__init__(statistics.layout, bits)
        self.bits = bits
        layout = statistics.layout
        noise: dict[Part, torch.Tensor] = {}
        self._predictors: dict[Part, tuple[torch.Tensor, torch.Tensor]] = {}
        for part in statistics.parts:
            layer, inputs = part[0], _inputs(part)
            mean, covariance = statistics.neighbours(layer)
            behind = {layer - 1: 0, layer: len(mean) - statistics.moments.width}
            columns = [behind[source] + statistics.columns(kind) for source, kind in (*inputs, part)]
            index, size = torch.cat(columns), sum(len(found) for found in columns[:-1])
            mean, covariance = mean[index], covariance[index][:, index]
            xx, xy, yy = covariance[:size, :size], covariance[:size, size:], covariance[size:, size:]
            weights = xy
            if inputs:
                xx = xx + torch.diag(torch.cat([noise[source] for source in inputs]))
                ridge = _RIDGE * xx.diagonal().mean() * torch.eye(size, dtype=torch.float64)
                stored = QuantisedMatrix.of(torch.linalg.solve(xx + ridge, xy))
                self.profile_bytes += matrix_bytes(stored)
                weights = stored.dense().double()
            residual = yy.diagonal() - (weights * (2 * xy - xx @ weights)).sum(0)
            noise[part] = DISTORTION[bits] * _head_means(residual, layout.kv_heads)
            bias = mean[size:] - mean[:size] @ weights
            self.profile_bytes += 4 * len(bias)
            self._predictors[part] = weights.float(), bias.float()

    def _through(self, layers: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        had: dict[Part, torch.Tensor] = {}
        num_bits = 0
        for number, layer in enumerate(layers):
            for kind, x in zip(("keys", "values"), self._kinds(layer), strict=True):
                part = (number, kind)
                weights, bias = self._predictors[part]
                inputs = [had[source] for source in _inputs(part)]
                predicted = bias + torch.cat(inputs, 1) @ weights if inputs else bias
                rest, count = quantise(x - predicted, self.layout.kv_heads, self.bits)
                had[part] = predicted + rest
                num_bits += count
        rows = [torch.cat((had[number, "keys"], had[number, "values"]), 1) for number in range(len(layers))]
        return rows, num_bits


def _inputs(part: Part) -> list[Part]:
    layer, kind = part
    here: list[Part] = [(layer, "keys")] if kind == "values" else []
    return here + ([(layer - 1, kind)] if layer else [])


def _head_means(variances: torch.Tensor, heads: int) -> torch.Tensor:
    by_head = variances.unflatten(0, (heads, -1))
    return by_head.mean(1, keepdim=True).expand_as(by_head).flatten()
