"""A profile without set-up: moments of rows that are encoded anyway, and a fit in the background.

Sensitivities need gradients, which a server has none of. Instead every layer's keys, and its values, get errors of one
share of their own variance. That needs more bits at equal divergence than measured sensitivities do, so the share is
small; ``sglang-plt calibrate`` gives the better profile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang_plt.calibration.make import make_profile
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec.profile import Profile, ProfileInfo

logger = logging.getLogger(__name__)

NOISE_SHARE = 0.005
"""Error of a coded component, as a share of the mean variance of its layer and kind."""
MAX_BYTES = 1 << 30
"""Most memory that moments may take; a wider model is not learned."""
ROWS_PER_CHANNEL = 8
"""Rows that are gathered, for every channel of a unit and the layer below it, before the fit."""


class SelfCalibration:
    """Gathers second moments until there are enough, then fits on a thread of its own.

    Args:
        info: what the profile is to be for; step, tokens and sensitivity are filled in.

    Raises:
        ValueError: the moments of such a model would exceed :data:`MAX_BYTES`.
    """

    def __init__(self, info: ProfileInfo) -> None:
        size = Moments.num_bytes(info.num_layers, info.width, info.group)
        if size > MAX_BYTES:
            raise ValueError(f"its second moments would take {size} bytes, more than {MAX_BYTES}")
        self.info = replace(info, step=(12 * NOISE_SHARE) ** 0.5, sensitivity="kind")
        self.rows_wanted = ROWS_PER_CHANNEL * info.width * (info.group + 1)
        self.profile: Profile | None = None
        self.failed = False
        self._moments: Moments | None = Moments(info.num_layers, info.width, info.group)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def wants_rows(self) -> bool:
        """False once enough was gathered."""
        return self._moments is not None and self._moments.count < self.rows_wanted

    @property
    def ready(self) -> bool:
        """True when :attr:`profile` is there, or never will be."""
        return self.profile is not None or self.failed

    def add(self, layers: Sequence[torch.Tensor]) -> None:
        """Take in rows of the same tokens in every layer, float32 ``[n, width]``; from any thread."""
        with self._lock:
            if not self.wants_rows or self._moments is None:
                return
            self._moments.add(layers)
            if not self.wants_rows:
                self._thread = threading.Thread(target=self._fit, name="plt-calibration", daemon=True)
                self._thread.start()

    def join(self) -> None:
        """Wait for the fit, if it has begun."""
        if self._thread is not None:
            self._thread.join()

    def _fit(self) -> None:
        moments = self._moments
        assert moments is not None
        try:
            info = replace(self.info, tokens=moments.count)
            self.profile = make_profile(info, moments, lambda unit: self._even(moments, unit))
        except Exception:
            self.failed = True
            logger.exception("PLT cache: no profile could be fitted; blocks go on to be stored as int8")
        self._moments = None

    def _even(self, moments: Moments, unit: range) -> torch.Tensor:
        """Weights that make one step the same share of the variance of every layer and kind."""
        variances = moments.covariances(unit)[4].diagonal()
        info, weights = self.info, []
        for part in variances.view(len(unit), info.width):
            for channels in part.split((info.kv_heads * info.head_dim, info.kv_heads * info.v_head_dim)):
                weights.append((1 / channels.mean().clamp_min(1e-12)).expand(len(channels)))
        return torch.diag(torch.cat(weights))
