"""A calibrated profile: one affine predictor and one transform a unit, in a safetensors file bound to its model.

A unit is one layer or a few neighbours, keys and values together.

Only numbers are read from the file: nothing is unpickled, every tensor's name, type and shape is known beforehand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from sglang_plt.codec.rows import RowLayout

PROFILE_FORMAT = 2
KEY = "sglang_plt"
"""Of the metadata that holds the header."""
_TOP = 127
_WIDE = 512
"""Rows of more channels than this take a transform a layer: joint ones grow with the square of what they span."""


class ProfileError(ValueError):
    """A profile that cannot serve here; the message names file, field and remedy."""


def unit_layers(num_layers: int, group: int) -> list[range]:
    """The layers of every unit: ``group`` neighbours share a transform, the last unit may have fewer."""
    return [range(first, min(first + group, num_layers)) for first in range(0, num_layers, group)]


def _affords_more(layout: RowLayout, codec: str) -> bool:
    """Whether larger matrices are worth their time: for ``dense`` on narrow rows."""
    return codec == "dense" and layout.kv_heads * (layout.head_dim + layout.v_head_dim) <= _WIDE


def default_token_layers(layout: RowLayout, codec: str, group: int) -> int:
    """Layers that tokens are to predict: the first unit, of ``dense`` on narrow rows the first three."""
    return group * (3 if _affords_more(layout, codec) else 1)


def default_group(layout: RowLayout, codec: str = "dense") -> int:
    """Layers of a unit: 3 for ``dense`` on narrow rows, where it saves a fifth of the bits, else 1 for speed."""
    return 3 if _affords_more(layout, codec) else 1


@dataclass(frozen=True)
class ProfileInfo:
    """What a profile was made of and what it is for.

    Attributes:
        codec: the codec that it is fitted for, ``fast`` or ``dense``.
        model: text that identifies the model's KV; see :func:`sglang_plt.calibration.identity.model_identity`.
        dtype: of the KV pool it is meant for, such as ``bfloat16``.
        num_layers, kv_heads, head_dim, v_head_dim: shape of the rows, of this rank.
        group: layers of a unit.
        keys_rotated: whether keys were taken as they lie in the pool, rotation and all.
        predicts: whether a unit is predicted from the layer below.
        hidden: channels of the token embedding that the first units are predicted from too; 0 where they are not.
        token_layers: units that begin below this layer are.
        step: step in weighted coordinates that the basis is scaled to.
        scale: the codec's quantiser step, in these steps.
        tokens: tokens behind the second moments.
        sensitivity: where the weights came from, ``fisher`` or ``kind``.
        tp_size, tp_rank: the rank's share of the heads.
    """

    codec: str
    model: str
    dtype: str
    num_layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    group: int
    keys_rotated: bool
    step: float
    scale: float
    tokens: int
    sensitivity: str
    tp_size: int = 1
    tp_rank: int = 0
    predicts: bool = True
    hidden: int = 0
    token_layers: int = 0

    @classmethod
    def open(cls, codec: str, model: str, layout: RowLayout, **fields: Any) -> ProfileInfo:
        """What a profile of rows of ``layout`` is to be for; step, scale and tokens are filled in by who fits it.

        Args:
            fields: the others, ``dtype`` and ``group`` where they are not those of the layout; ``hidden`` where tokens
                are to predict the first layers.
        """
        values: dict[str, Any] = {
            "dtype": str(layout.dtype).removeprefix("torch."),
            "num_layers": layout.num_layers,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "v_head_dim": layout.v_head_dim,
            "group": default_group(layout, codec),
            "step": 1.0,
            "scale": 1.0,
            "tokens": 0,
        }
        values |= fields
        if values.get("hidden"):
            values.setdefault("token_layers", default_token_layers(layout, codec, values["group"]))
        return cls(codec=codec, model=model, **values)

    @property
    def kind(self) -> str:
        """The codec, with ``-flat`` where nothing is predicted."""
        return self.codec if self.predicts else f"{self.codec}-flat"

    @property
    def width(self) -> int:
        """Channels of one layer's row: all keys, then all values."""
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def units(self) -> list[range]:
        """The layers of every unit; the last may have fewer than ``group``."""
        return unit_layers(self.num_layers, self.group)

    def hidden_of(self, unit: range) -> int:
        """Channels of the token embedding that a unit is predicted from."""
        return self.hidden if self.predicts and unit.start < self.token_layers else 0

    def inputs_of(self, unit: range) -> int:
        """Channels that a unit is predicted from: of the token embedding, then of the layer below."""
        return self.hidden_of(unit) + (self.width if self.predicts and unit.start else 0)

    def check(
        self, kind: str, layout: RowLayout, model: str, keys_rotated: bool, tp_size: int = 1, tp_rank: int = 0
    ) -> None:
        """Refuse a profile of other rows.

        Raises:
            ProfileError: the first field that differs, with both values.
        """
        here = {
            "kind": kind,
            "model": model,
            "dtype": str(layout.dtype).removeprefix("torch."),
            "num_layers": layout.num_layers,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "v_head_dim": layout.v_head_dim,
            "keys_rotated": keys_rotated,
            "tp_size": tp_size,
            "tp_rank": tp_rank,
        }
        for name, value in here.items():
            if getattr(self, name) != value:
                raise ProfileError(f"it was made for {name}={getattr(self, name)!r}, this model has {value!r}")


@dataclass(frozen=True)
class QuantisedMatrix:
    """``codes * columns`` with rows scaled by ``rows``: an int8 matrix with a scale a row and one a column.

    Attributes:
        codes: int8 ``[n, m]``.
        rows: float32 ``[n]``.
        columns: float32 ``[m]``.
    """

    codes: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> QuantisedMatrix:
        """Nearest codes: rows are brought to a common size first, then every column fills its 255 levels."""
        if not matrix.numel():
            return cls(matrix.to(torch.int8), torch.ones(len(matrix)), torch.ones(matrix.shape[1]))
        rows = matrix.double().pow(2).mean(1).sqrt().clamp_min(1e-30).float()
        even = matrix.double() / rows[:, None].double()
        columns = (even.abs().amax(0) / _TOP).clamp_min(1e-30).float()
        return cls((even / columns.double()).round().to(torch.int8), rows, columns)

    def dense(self) -> torch.Tensor:
        """float32 ``[n, m]``."""
        return self.codes.float() * self.columns * self.rows[:, None]


@dataclass(frozen=True)
class UnitTransform:
    """One unit as it is stored; shapes as :class:`calibration.fit.UnitFit`."""

    weights: QuantisedMatrix
    bias: torch.Tensor
    basis: QuantisedMatrix


@dataclass(frozen=True)
class Profile:
    """See the module; ``id`` stands in every block that needs it."""

    info: ProfileInfo
    units: tuple[UnitTransform, ...]
    id: int

    @classmethod
    def make(cls, info: ProfileInfo, units: Iterable[UnitTransform]) -> Profile:
        units = tuple(units)
        digest = xxhash.xxh3_64(json.dumps(asdict(info), sort_keys=True).encode())
        for tensor in _tensors(units).values():
            digest.update(tensor.numpy().data)
        return cls(info, units, digest.intdigest())

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as on disk."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.units).values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        header = {"format": PROFILE_FORMAT, **asdict(self.info)}
        try:
            save_file(_tensors(self.units), partial, metadata={KEY: json.dumps(header, sort_keys=True)})
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _tensors(units: Iterable[UnitTransform]) -> dict[str, torch.Tensor]:
    found = {}
    for number, unit in enumerate(units):
        found[f"{number}.bias"] = unit.bias
        for name, matrix in (("weights", unit.weights), ("basis", unit.basis)):
            for part in ("codes", "rows", "columns"):
                found[f"{number}.{name}.{part}"] = getattr(matrix, part).contiguous()
    return found
