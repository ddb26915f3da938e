"""A profile without set-up: moments of rows that are encoded anyway, and a fit in the background.

Sensitivities need gradients, which a server has none of. Instead every layer's keys, and its values, get errors of one
share of their own variance. That needs more bits at equal divergence than measured sensitivities do, so the share is
small; ``sglang-plt calibrate`` gives the better profile.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from sglang_plt.calibration.make import SCALES, make_profile, mean_by_kind
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec.profile import Profile, ProfileInfo

logger = logging.getLogger(__name__)

NOISE_SHARE = 0.005
"""Error of a coded component, as a share of the mean variance of its layer and kind."""
MAX_BYTES = 1 << 30
"""Most memory that moments may take; a wider model is not learned."""
ROWS_PER_CHANNEL = 8
"""Rows that are gathered, for every channel of a unit and the layer below it, before the fit."""
_WAITING = 2  # blocks whose rows wait for their moments; what comes while they do is not learned from

T = TypeVar("T")


class SelfCalibration(Generic[T]):
    """Gathers second moments until there are enough, then fits; all of it on a thread of its own.

    Args:
        info: what the profile is to be for; step, scale, tokens and sensitivity are filled in.
        build: makes of the profile what is wanted; runs on that thread too.

    Attributes:
        result: what ``build`` made, once it is there.
        done: True when there is a result, or never will be.

    Raises:
        ValueError: the moments of such a model would exceed :data:`MAX_BYTES`.
    """

    def __init__(self, info: ProfileInfo, build: Callable[[Profile], T]) -> None:
        self._shape = (info.num_layers, info.width, info.group, info.hidden, info.token_layers)
        size = Moments.num_bytes(*self._shape)
        if size > MAX_BYTES:
            raise ValueError(f"its second moments would take {size} bytes, more than {MAX_BYTES}")
        step = (12 * NOISE_SHARE) ** 0.5
        self.info = replace(info, step=step, scale=SCALES[info.codec], sensitivity="kind")
        self.rows_wanted = ROWS_PER_CHANNEL * (info.width * (info.group + 1) + info.hidden)
        self.result: T | None = None
        self.done = False
        self._build = build
        self._rows: queue.Queue[tuple[Sequence[torch.Tensor], torch.Tensor | None]] = queue.Queue(_WAITING)
        self._enough = False
        self._thread: threading.Thread | None = None

    @property
    def wants_rows(self) -> bool:
        """False while rows wait, and once enough were gathered."""
        return not self._enough and not self._rows.full()

    def offer(self, layers: Sequence[torch.Tensor], features: torch.Tensor | None = None) -> None:
        """Rows of the same tokens in every layer, float32 ``[n, width]``; returns at once. One thread at a time.

        Args:
            features: of these tokens, float32 ``[n, hidden]``, where the profile is to predict from them.
        """
        try:
            self._rows.put_nowait((layers, features))
        except queue.Full:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="plt-calibration", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until it is done; rows for that must have been offered."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        info = self.info
        try:
            moments = Moments(*self._shape)
            while moments.count < self.rows_wanted:
                moments.add(*self._rows.get())
            self._enough = True
            profile = make_profile(replace(info, tokens=moments.count), moments, lambda unit: self._even(moments, unit))
            self.result = self._build(profile)
        except Exception:
            logger.exception("PLT cache: no profile could be learned; blocks go on to be stored as they are")
        self._enough = self.done = True

    def _even(self, moments: Moments, unit: range) -> torch.Tensor:
        """Weights that make one step the same share of the variance of every layer and kind."""
        variances = mean_by_kind(self.info, moments.covariances(unit)[4].diagonal())
        return torch.diag(1 / variances.clamp_min(1e-12))
