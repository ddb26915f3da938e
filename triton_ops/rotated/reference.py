"""Rotated Lloyd-Max codes, formats ``rotated1/1`` to ``rotated8/1``: the plain-torch specification.

A head row is turned by a fixed random rotation, after which its channels look like draws of one normal distribution
whatever the row was, and every channel is stored as the nearest Lloyd-Max level of that distribution.

    norm    the row's length, to the nearest float16, ties to even
    code    how many boundaries lie below the turned channel over ``scale``; 0 is the lowest of the 2**bits levels
    scale   norm * dim**-0.5, or no division when norm is 0: every channel is then taken as 0

Channel j of a head row has bits ``j * bits .. j * bits + bits - 1`` of a string of bits, least significant bit first;
bit k of the string is bit ``k % 8`` of byte ``k // 8``. A head row ends with zero bits up to a whole byte.

Every step is one fp32 operation in this order (dim**-0.5 and n**-0.5 are rounded to fp32 once), so every backend must
produce the same bytes. Changing any of this is a new format version, not an edit.

Length: channels are squared, zeros are appended up to a power of two, and the second half is added to the first until
one number is left; then its square root.

Rotation: n is the largest power of two not above dim. The first n channels are turned, then, if n < dim, the last n
(the two pieces overlap, so dim needs no padding and every channel is mixed). To turn a piece is to multiply channel j
by its sign, then for h = 1, 2, 4, .. n / 2 to replace the channels (j, j + h), with bit h of j clear, by (a + b,
a - b), then to multiply by n**-0.5. Channel j of the first piece has the sign of draw j, of the second that of draw
n + j: minus if the highest bit of the draw is set. Draws are SplitMix64's with seed 0x504C54: draw i is
``mix(seed + (i + 1) * G)`` modulo 2**64 with G = 0x9E3779B97F4A7C15, and mix(z) is ``z ^= z >> 30; z *=
0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31``.

Levels are constants (``levels.py``), the negatives before the positives; a boundary is half the sum of two neighbours.

Decoding: level * scale in the turned channels, then the pieces in reverse order: the same sums and differences, times
n**-0.5, times the signs.

Source: TurboQuant (its variant of least squared error), arXiv 2504.19874, with a randomised Hadamard transform for its
rotation; the overlapping pieces and the bytes are ours.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from triton_ops.rotated.levels import POSITIVE

BITS = tuple(POSITIVE)
NORM_MAX = 65504.0
SEED = 0x504C54
_MASK = (1 << 64) - 1


class NotEncodable(ValueError):
    """A head row is not finite, or longer than float16's range, 65504."""


def code_bytes(dim: int, bits: int) -> int:
    """Bytes of the codes of one head row."""
    return -(-dim * bits // 8)


@cache
def signs_of(count: int) -> tuple[float, ...]:
    """The signs of draws 0 .. count - 1."""
    signs = []
    for i in range(count):
        z = (SEED + (i + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        signs.append(-1.0 if (z ^ z >> 31) >> 63 else 1.0)
    return tuple(signs)


def _levels(bits: int, device: torch.device) -> torch.Tensor:
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float32, device=device)
    return torch.cat((-positive.flip(0), positive))


def _pieces(dim: int, device: torch.device) -> list[tuple[slice, torch.Tensor]]:
    """The channels that are turned together, and their signs, in order."""
    n = 1 << dim.bit_length() - 1
    signs = torch.tensor(signs_of(2 * n), device=device)
    return [(slice(0, n), signs[:n])] + ([(slice(dim - n, dim), signs[n:])] if n < dim else [])


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    h = 1
    while h < n:
        a, b = x.unflatten(-1, (n // (2 * h), 2, h)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        h *= 2
    return x * (1.0 / math.sqrt(n))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``[..., dim]`` float32, turned; lengths and angles stay."""
    x = x.clone()
    for channels, signs in _pieces(x.shape[-1], x.device):
        x[..., channels] = _hadamard(x[..., channels] * signs)
    return x


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`rotate`, up to fp32 rounding."""
    x = x.clone()
    for channels, signs in reversed(_pieces(x.shape[-1], x.device)):
        x[..., channels] = _hadamard(x[..., channels]) * signs
    return x


def _lengths(x: torch.Tensor) -> torch.Tensor:
    squares = x * x
    short = (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]
    squares = torch.nn.functional.pad(squares, (0, short))
    while squares.shape[-1] > 1:
        first, second = squares.chunk(2, -1)
        squares = first + second
    return squares[..., 0].sqrt()


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    string = (codes.unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1).flatten(-2)
    string = torch.nn.functional.pad(string, (0, -string.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (string << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def _unpack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    string = (codes.to(torch.int64).unsqueeze(-1) >> torch.arange(8, device=codes.device) & 1).flatten(-2)
    string = string[..., : dim * bits].unflatten(-1, (dim, bits))
    return (string << torch.arange(bits, device=codes.device)).sum(-1)


def encode(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode head rows.

    Args:
        x: ``[rows, heads, dim]`` float32, any device.
        bits: 1 to 8.

    Returns:
        norms: ``[rows, heads]`` float16.
        codes: ``[rows, heads, ceil(dim * bits / 8)]`` uint8.
        :func:`decode` errs by at most a half gap of the levels times ``norm * dim**-0.5`` in every turned channel that
        lies between the outermost levels, and by the distance to the nearer of those in any other.

    Raises:
        NotEncodable: a value is NaN or infinite, or a head row is longer than 65504.
        TypeError, ValueError: ``x`` or ``bits`` is not as above.
    """
    if bits not in BITS:
        raise ValueError(f"rotated: bits must be 1 to 8, got {bits}")
    if x.dtype != torch.float32:
        raise TypeError(f"rotated: rows must be float32, got {x.dtype}")
    if x.ndim != 3 or not x.shape[-1]:
        raise ValueError(f"rotated: rows must be [rows, heads, dim] with a dim of at least 1, got {tuple(x.shape)}")
    lengths = _lengths(x)
    if not bool((lengths <= NORM_MAX).all()):  # false for NaN too
        raise NotEncodable(f"rotated: every head row must be finite and at most {NORM_MAX:.0f} long")
    norms = lengths.to(torch.float16)
    scale = norms.float() * (1.0 / math.sqrt(x.shape[-1]))
    per_scale = torch.where(scale > 0, torch.ones_like(scale) / scale, torch.zeros_like(scale))
    levels = _levels(bits, x.device)
    boundaries = (levels[:-1] + levels[1:]) * 0.5
    return norms, _pack(torch.bucketize(rotate(x) * per_scale.unsqueeze(-1), boundaries), bits)


def decode(norms: torch.Tensor, codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Rows from the ``norms`` and ``codes`` of those rows, ``[n, heads, dim]`` float32; norm 0 gives zeros."""
    scale = norms.float() * (1.0 / math.sqrt(dim))
    return rotate_back(_levels(bits, codes.device)[_unpack(codes, bits, dim)] * scale.unsqueeze(-1))
