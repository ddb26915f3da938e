"""Matrix products of the codecs."""

from __future__ import annotations

import numpy as np
import torch
from threadpoolctl import threadpool_limits


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x @ matrix``, float32 ``[n, k]`` by ``[k, m]``.

    On a CPU by numpy's BLAS: OpenBLAS knows AMD's cores as well as Intel's, where torch's MKL runs at half their speed.
    """
    if x.device.type != "cpu":
        return x @ matrix
    with np.errstate(over="ignore", invalid="ignore"):  # rows that are not finite are dealt with by their results
        return torch.from_numpy(x.numpy() @ matrix.numpy())


def match_threads() -> None:
    """Give numpy's BLAS as many threads as torch has; they would wait for one another spinning on fewer cores."""
    threadpool_limits(torch.get_num_threads(), user_api="blas")
