"""Asymmetric integer groups, formats ``int8/1`` and ``int4/1``: the plain-torch specification of the CPU kernels.

A group shares one float16 ``low`` and one float16 ``scale``; a value is stored as the integer code nearest to
``(value - low) / scale``. Keys are grouped along tokens, one group per channel and 64 rows, because a few key channels
are large in every token; values are grouped along channels, one group per token and head. Both are asymmetric.

    low    the largest float16 not above the smallest value of the group; zero is stored as +0
    scale  the smallest float16 not below (largest - low) / top, top = 2**bits - 1; 0 when all values equal low
    code   floor((value - low) / scale + 0.5), at most top; 0 when scale is 0

Codes are computed against the *stored* low and scale, so what was lost in rounding those two is made good by the codes.
Every step is one fp32 operation in a fixed order, so every backend must produce the same bytes: the tests use
``torch.equal``, never a tolerance. Changing any of this is a new format version, not an edit.

    int8  one byte a code
    int4  byte j of a head row: channel j in bits 0-3, channel j + dim/2 in bits 4-7

Source: the per-channel keys and per-token values are those of KIVI, arXiv 2402.02750; directed rounding of low and
scale and the nibble order (both halves of a NeoX rotary pair in one byte) are ours.
"""

from __future__ import annotations

import torch

GROUP = 64
"""Consecutive rows that share a key channel's low and scale; the last group of a block may be shorter."""
BITS = (4, 8)
FP16_MAX = 65504.0


class NotEncodable(ValueError):
    """The rows hold a value that is not finite or beyond float16's range, 65504."""


def check_input(x: torch.Tensor, bits: int) -> None:
    """Refuse shapes and types that no implementation can encode."""
    if bits not in BITS:
        raise ValueError(f"int_groups: bits must be 4 or 8, got {bits}")
    if x.dtype != torch.float32:
        raise TypeError(f"int_groups: rows must be float32, got {x.dtype}")
    if x.ndim != 3:
        raise ValueError(f"int_groups: rows must be [rows, heads, dim], got shape {tuple(x.shape)}")
    if bits == 4 and x.shape[-1] % 2:
        raise ValueError(f"int_groups: int4 packs two channels a byte, dim must be even, got {x.shape[-1]}")


def _half_at_most(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 not above ``x`` (float32, ``|x| <= 65504``)."""
    nearest = (x + 0.0).to(torch.float16)  # + 0.0 turns -0 into +0
    bits = nearest.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, bits + 1)
    below = torch.where(bits == 0, torch.full_like(bits, -0x7FFF), below)
    return torch.where(nearest.float() > x, below, bits).view(torch.float16)


def _half_at_least(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 not below ``x`` (float32, ``0 <= x < 65504``); zero is +0."""
    nearest = (x + 0.0).to(torch.float16)  # + 0.0 turns -0 into +0
    bits = nearest.view(torch.int16)
    return torch.where(nearest.float() < x, bits + 1, bits).view(torch.float16)


def _low_and_scale(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    smallest, largest = x.amin(dim), x.amax(dim)
    if not bool(((smallest >= -FP16_MAX) & (largest <= FP16_MAX)).all()):  # false for NaN too
        raise NotEncodable(f"int_groups: every value must be finite and at most {FP16_MAX:.0f} in magnitude")
    low = _half_at_most(smallest)
    # times the rounded reciprocal: a division by a constant is not the same operation on every backend
    return low, _half_at_least((largest - low.float()) * (1.0 / (2**bits - 1)))


def _codes(x: torch.Tensor, low: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    low, scale = low.float(), scale.float()
    per_step = torch.where(scale > 0, torch.ones_like(scale) / scale, torch.zeros_like(scale))
    codes = torch.floor((x - low) * per_step + 0.5).clamp(max=2**bits - 1).to(torch.uint8)
    if bits == 8:
        return codes
    half = codes.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << 4


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    return codes.float()


def encode_keys(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode key rows, one group per (64 rows, head, channel).

    Args:
        x: ``[rows, heads, dim]`` float32, any device; ``dim`` even for 4 bits.
        bits: 4 or 8.

    Returns:
        params: ``[ceil(rows / 64), 2, heads, dim]`` float16, lows then scales.
        codes: ``[rows, heads, dim * bits / 8]`` uint8.
        The absolute error of :func:`decode_keys` is at most half a scale, plus fp32 rounding.

    Raises:
        NotEncodable: a value is NaN, infinite or beyond 65504.
        TypeError, ValueError: ``x`` or ``bits`` is not as above.
    """
    check_input(x, bits)
    rows, heads, dim = x.shape
    params = torch.empty((-(-rows // GROUP), 2, heads, dim), dtype=torch.float16, device=x.device)
    codes = torch.empty((rows, heads, dim * bits // 8), dtype=torch.uint8, device=x.device)
    for group, first in enumerate(range(0, rows, GROUP)):
        part = x[first : first + GROUP]
        low, scale = _low_and_scale(part, bits, 0)
        params[group, 0], params[group, 1] = low, scale
        codes[first : first + GROUP] = _codes(part, low, scale, bits)
    return params, codes


def decode_keys(params: torch.Tensor, codes: torch.Tensor, bits: int, start: int = 0) -> torch.Tensor:
    """Rows ``start .. start + n`` from all ``params`` and the codes of those rows, ``[n, heads, dim]`` float32.

    A value is ``code * scale + low``: one fp32 product, one fp32 sum.
    """
    group = torch.arange(start, start + len(codes), device=codes.device) // GROUP
    low, scale = params[group].float().unbind(1)
    return _unpack(codes, bits) * scale + low


def encode_values(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode value rows, one group per (row, head); arguments, bound and errors as :func:`encode_keys`.

    Returns:
        params: ``[rows, heads, 2]`` float16, low and scale.
        codes: ``[rows, heads, dim * bits / 8]`` uint8.
    """
    check_input(x, bits)
    low, scale = _low_and_scale(x, bits, -1)
    return torch.stack((low, scale), -1), _codes(x, low.unsqueeze(-1), scale.unsqueeze(-1), bits)


def decode_values(params: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows from the ``params`` and codes of those rows, ``[n, heads, dim]`` float32; ``code * scale + low`` in fp32."""
    low, scale = params.float().unsqueeze(-2).unbind(-1)
    return _unpack(codes, bits) * scale + low


def to_pool_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to the pool's dtype, to nearest even; float16 saturates at 65504 instead of becoming infinite."""
    if dtype == torch.float16:
        x = x.clamp(-FP16_MAX, FP16_MAX)
    return x.to(dtype)
