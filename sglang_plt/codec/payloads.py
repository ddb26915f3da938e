"""Reads payloads of one profile, those of reference blocks once for many that refer to them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sglang_plt.codec.base import Codec
from sglang_plt.codec.coded import HEAD, CodedRows, Mode, mode_of, parse
from sglang_plt.codec.delta import Differences
from sglang_plt.codec.packing import Packing
from sglang_plt.codec.reference import BlockDamaged, OpenReference, Sources
from sglang_plt.codec.rows import RowLayout

_OPEN_REFERENCES = 4  # whose codes are at hand: blocks that are written or read together often share them


class Payloads:
    """Takes payloads apart, and names what a block can be coded as differences from.

    Args:
        widths: components of every unit.
        packing: of the codec.
        fallback: what stores rows that the profile does not fit.
    """

    def __init__(self, layout: RowLayout, widths: Sequence[int], packing: Packing, fallback: Codec) -> None:
        self._layout, self._widths, self._packing, self._fallback = layout, widths, packing, fallback
        self._open: OrderedDict[int, CodedRows] = OrderedDict()  # by checksum
        self._lock = threading.Lock()

    def mode(self, payload: np.ndarray, num_rows: int, num_exact: int) -> Mode:
        """How a payload goes on; raises what :func:`mode_of` does."""
        fallback_bytes = self._fallback.payload_limit(num_rows, num_exact)
        return mode_of(payload, num_exact * self._layout.row_bytes, fallback_bytes)

    def parse(self, payload: np.ndarray, num_rows: int, num_exact: int) -> CodedRows:
        """Its coded rows; raises what :func:`sglang_plt.codec.coded.parse` does."""
        layout = self._layout
        width = layout.kv_heads * (layout.head_dim + layout.v_head_dim)
        at = HEAD.size + num_exact * layout.row_bytes
        return parse(payload, at, num_rows - num_exact, self._widths, width, layout.num_layers, self._packing)

    def reference(self, reference: OpenReference) -> CodedRows:
        """The codes of a reference block.

        Raises:
            BlockDamaged: it has none of its own: it is a difference itself, or ``int8``.
        """
        with self._lock:
            found = self._open.get(reference.checksum)
            if found is not None:
                self._open.move_to_end(reference.checksum)
                return found
        if self.mode(reference.payload, reference.num_rows, reference.num_exact) != Mode.CODED:
            raise BlockDamaged(f"payload: the block of checksum {reference.checksum:#018x} cannot be a reference")
        found = self.parse(reference.payload, reference.num_rows, reference.num_exact)
        with self._lock:
            self._open[reference.checksum] = found
            while len(self._open) > _OPEN_REFERENCES:
                self._open.popitem(last=False)
        return found

    def named(self, coded: CodedRows, references: Sequence[OpenReference]) -> list[CodedRows]:
        """The reference blocks that a payload names.

        Raises:
            BlockDamaged: one is not there, or cannot be a reference.
        """
        if coded.sources is None:
            return []
        given = {reference.checksum: reference for reference in references}
        found = []
        for checksum in coded.sources.checksums.tolist():
            if checksum not in given:
                raise BlockDamaged(f"payload: it needs the reference block of checksum {checksum:#018x}")
            found.append(self.reference(given[checksum]))
        coded.sources.check([reference.num_rows for reference in found])
        return found

    def differences(
        self, references: Sequence[OpenReference], num_exact: int, num_rows: int, scale: float
    ) -> Differences | None:
        """What ``num_rows`` coded rows behind ``num_exact`` others resemble; None where nothing serves.

        Args:
            scale: steps of the profile in a step.
        """
        opened = []
        for reference in references:
            with contextlib.suppress(BlockDamaged):
                opened.append((reference, self.reference(reference)))
        sources = Sources.fit(
            [reference for reference, _ in opened], [coded.escaped for _, coded in opened], num_exact, num_rows
        )
        if sources is None:
            return None
        return Differences(sources, [coded for _, coded in opened], self._packing, self._widths, scale)
