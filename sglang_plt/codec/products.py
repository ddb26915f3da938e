"""Matrix products of the codecs."""

from __future__ import annotations

import numpy as np
import torch
from threadpoolctl import threadpool_limits


def product(x: torch.Tensor, matrix: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ matrix + plus``, float32 ``[n, k]`` by ``[k, m]`` and ``[n, m]`` or ``[m]``.

    On a CPU by numpy's BLAS: OpenBLAS knows AMD's cores as well as Intel's, where torch's MKL runs at half their speed.
    """
    if x.device.type != "cpu":
        return x @ matrix if plus is None else torch.addmm(plus, x, matrix)
    with np.errstate(over="ignore", invalid="ignore"):  # rows that are not finite are dealt with by their results
        out = x.numpy() @ matrix.numpy()
        if plus is not None:
            out += plus.numpy()
    return torch.from_numpy(out)


def chosen_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``matrix[rows]``; on a CPU in this thread alone."""
    if matrix.device.type != "cpu":
        return matrix[rows]
    return torch.from_numpy(np.take(matrix.numpy(), rows.numpy(), 0))


def limit_blas() -> None:
    """Give numpy's BLAS one thread.

    Its threads and those of torch's OpenMP spin while they wait for one another: with two of each on two cores a decode
    takes twenty times as long as with one. What runs side by side are blocks, see :class:`sglang_plt.codec.Workers`.
    """
    threadpool_limits(1, user_api="blas")
