"""Codecs ``dense`` and ``fast``: every layer is predicted from the layer below, the rest transformed and quantised.

The prediction reads what the decoder will have (closed loop), so errors do not add up over layers. See
:mod:`sglang_plt.calibration.fit` for the numbers and FORMAT.md for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sglang_plt.codec.base import Codec, as_bytes
from sglang_plt.codec.coded import HEAD, CodedRows, Mode, write
from sglang_plt.codec.delta import Differences
from sglang_plt.codec.embedding import TokenEmbedding, checked_tokens, token_hash
from sglang_plt.codec.int_groups import IntGroups
from sglang_plt.codec.layers import Write
from sglang_plt.codec.packings import PACKINGS
from sglang_plt.codec.payloads import Payloads
from sglang_plt.codec.products import limit_blas
from sglang_plt.codec.profile import Profile
from sglang_plt.codec.reference import OpenReference
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows, layer_rows
from sglang_plt.codec.scatter import Scatter
from sglang_plt.codec.transform import units_of
from sglang_plt.codec.unit_writer import UnitWriter, write_exact

_LARGEST_ROW = 65504.0  # larger values, and those not finite, are kept in float32


class Predictive(Codec):
    """Codec of a :class:`Profile`; what its profile does not fit is stored as ``int8``, a block at a time.

    Args:
        profile: names the codec, one of :data:`PACKINGS`, and with it the packing.
        scale: steps of the profile in a step of the quantiser; half of it means a quarter of the divergence.
        embedding: the model's, where the first layers are to be predicted from tokens as the profile can.
        triton: decode by Triton kernels.

    Raises:
        ValueError: the profile was made for other rows or another embedding, or cannot be used.
    """

    version = 2
    fixed_size = False

    def __init__(
        self,
        pool: PoolRows,
        rotary: Rotary | None,
        profile: Profile,
        scale: float,
        embedding: TokenEmbedding | None = None,
        triton: bool = False,
    ) -> None:
        super().__init__(pool, rotary)
        if profile.info.codec not in PACKINGS:
            raise ValueError(f"profile: its codec {profile.info.codec!r} is none of {', '.join(PACKINGS)}")
        self.name, self.profile, self.scale = profile.info.codec, profile, float(np.float32(scale))
        self.packing = PACKINGS[self.name]
        self.profile_id = profile.id
        self.takes_references = rotary is not None
        self._fallback = IntGroups(pool, rotary, 8)
        info, layout = profile.info, self.layout
        shape = (layout.num_layers, layout.kv_heads, layout.head_dim, layout.v_head_dim, rotary is None)
        if (info.num_layers, info.kv_heads, info.head_dim, info.v_head_dim, info.keys_rotated) != shape:
            raise ValueError(f"codec {self.name}: the profile is of other rows than {layout}")
        self._embedding = embedding if info.hidden else None
        if self._embedding is not None and self._embedding.hidden != info.hidden:
            raise ValueError(
                f"codec {self.name}: the profile is of an embedding of {info.hidden} channels, not "
                f"{self._embedding.hidden}"
            )
        self.takes_tokens = self._embedding is not None
        self._scatter = Scatter(pool, rotary)
        limit_blas()
        self._units = units_of(profile, pool.device)
        widths = [len(unit.bias) for unit in self._units]
        self._writer: Callable[..., UnitWriter] = UnitWriter
        if triton:
            from sglang_plt.codec.unit_triton import TritonUnitWriter, UnitKernels  # takes seconds to import

            self._writer = partial(TritonUnitWriter, UnitKernels(pool, rotary, self._units))
        self._payloads = Payloads(layout, widths, self.packing, self._fallback)

    @property
    def stores_rotated_keys(self) -> bool:
        return self.rotary is None

    def warm_up(self) -> None:
        super().warm_up()
        self.packing.warm_up()
        self._scatter.warm_up()

    def _for_pool(self, pool: PoolRows) -> Codec:
        return self._fallback._for_pool(pool)  # the profile is of all layers

    def payload_limit(self, num_rows: int, num_exact: int) -> int:
        return HEAD.size + self._fallback.payload_limit(num_rows, num_exact)

    # -- encoding -------------------------------------------------------------------------------------------------

    def _encode(
        self,
        slots: torch.Tensor,
        position: int,
        num_exact: int,
        out: np.ndarray,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> int:
        if self.rotary is not None:
            self.rotary.check_positions(position, len(slots))
        coded = self._coded(slots, position, num_exact, references, tokens)
        if len(coded) <= len(out):
            out[: len(coded)] = np.frombuffer(coded, np.uint8)
            return len(coded)
        used = self._fallback.encode(slots, position, num_exact, out[HEAD.size :])
        out[: HEAD.size] = np.frombuffer(HEAD.pack(Mode.FALLBACK, 0, 1.0), np.uint8)
        return HEAD.size + used

    def _coded(
        self,
        slots: torch.Tensor,
        position: int,
        num_exact: int,
        references: Sequence[OpenReference] = (),
        tokens: np.ndarray | None = None,
    ) -> bytes:
        """The payload, however long, in any mode but the fallback's."""
        slots = slots.to(self.pool.device)
        exact = [
            as_bytes(buffer[slots[:num_exact]]).cpu().numpy().tobytes()
            for buffers in zip(self.pool.keys, self.pool.values, strict=True)
            for buffer in buffers
        ]
        slots, position = slots[num_exact:], position + num_exact
        if not len(slots):
            return b"".join((HEAD.pack(Mode.CODED, 0, self.scale), *exact))
        rows = layer_rows(self.pool, self.rotary, slots, position)
        if self._embedding is None or self._embedding.changed:
            tokens = None
        tokens = None if tokens is None else tokens[num_exact:]
        near = self._payloads.differences(references, num_exact, len(slots), self.scale) if references else None
        if near is not None:
            coded = self._quantise(rows, near, tokens)
            dear = near.dear_rows()
            if not len(dear):
                return write(coded, exact, rows, self.packing)
            near = near.without(dear)
        return write(self._quantise(rows, near, tokens), exact, rows, self.packing)

    def _quantise(self, rows: list[torch.Tensor], near: Differences | None, tokens: np.ndarray | None) -> CodedRows:
        """Codes of all units, of rows ``[n, width]`` a layer; rows that have a reference as differences from it."""
        escaped = torch.zeros(len(rows[0]), dtype=torch.bool, device=rows[0].device)
        for row in rows:
            escaped |= ~(row.abs().amax(1) <= _LARGEST_ROW)  # true for NaN
        own = []
        below: torch.Tensor | None = None
        features = self._features(tokens)
        for number, unit in enumerate(self._units):
            predicted = unit.predict(below, features)
            row = torch.cat(rows[unit.layers.start : unit.layers.stop], 1)
            components = unit.analyse(row, predicted) / self.scale
            escaped |= ~self.packing.fits(components)
            components[escaped] = 0
            if near is None:
                codes, kept = self.packing.quantise(components)
                own.append(codes)
            else:
                kept = torch.empty_like(components)
                if len(near.own):
                    codes, kept[near.own] = self.packing.quantise(components[near.own])
                    own.append(codes)
                kept[near.rows] = near.quantise(number, components[near.rows], escaped)
            below = unit.synthesise(predicted, kept * self.scale)[:, -self.profile.info.width :]
        return CodedRows(
            num_rows=len(rows[0]),
            scale=self.scale,
            escaped=escaped.nonzero().flatten().cpu().numpy(),
            exceptions=None,
            own=own,
            sources=None if near is None else near.sources,
            differences=[] if near is None else near.codes,
            tokens=None if tokens is None else token_hash(tokens),
        )

    def _features(self, tokens: np.ndarray | None) -> torch.Tensor | None:
        if tokens is None:
            return None
        assert self._embedding is not None
        return self._embedding(tokens)

    # -- decoding -------------------------------------------------------------------------------------------------

    def _begin(
        self,
        payload: np.ndarray,
        num_rows: int,
        num_exact: int,
        start: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> Write:
        if self.rotary is not None:
            self.rotary.check_positions(position + start, len(slots))
        if self._payloads.mode(payload, num_rows, num_exact) == Mode.FALLBACK:
            inside, end = payload[HEAD.size :], start + len(slots)
            writer = self._fallback.begin(inside, num_rows, num_exact, start, end, slots, position)
            return lambda first, stop: writer.write_to(stop)
        slots = slots.to(self.pool.device)
        low, high = max(start - num_exact, 0), start + len(slots) - num_exact  # coded rows
        units: UnitWriter | None = None
        if high > low:
            coded = self._payloads.parse(payload, num_rows, num_exact)
            tokens = checked_tokens(coded.tokens, self._embedding, None if tokens is None else tokens[num_exact:])
            features = self._features(tokens)
            units = self._writer(
                self._units,
                self.packing,
                self._scatter,
                self.pool.device,
                coded,
                self._payloads.named(coded, references),
                low,
                high,
                slots[max(num_exact - start, 0) :],
                position + num_exact + low,
                None if features is None else features[low:high],
            )

        def write_layers(first: int, stop: int) -> None:
            write_exact(self.pool, payload, num_exact, start, slots, first, stop)
            if units is not None:
                units.write_to(stop)

        return write_layers
