"""Adds rows of reference blocks to differences: the plain-torch specification of :mod:`triton_ops.align.kernel`.

    out[row] = own[row] + scale[row] * reference[source[row]]

one fp32 product and one fp32 sum a component. A row whose source is -1 has no reference and is copied bit for bit.

Source: FORMAT.md, "Differences": a row is ``(scale' components' + scale d) basis``. ``scale[row]`` is scale' / scale,
so that :func:`triton_ops.transform.kernel.restore_unit` multiplies the sum by the scale of the block; one a row, for a
block has up to eight references.
"""

from __future__ import annotations

import torch


def add_rows(own: torch.Tensor, reference: torch.Tensor, source: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Components in steps of the block that ``own`` is of.

    Args:
        own: float32 ``[n, components]``, in steps.
        reference: float32 ``[m, components]``, in steps of their own blocks, one block after the other.
        source: int64 ``[n]``, rows of ``reference``; -1 for none.
        scale: float32 ``[n]``; anything where there is no source.

    Returns:
        float32 ``[n, components]``, a new tensor.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    check_input(own, reference, source, scale)
    out = own.clone()
    rows = torch.nonzero(source >= 0).flatten()
    out[rows] += scale[rows, None] * reference[source[rows]]
    return out


def check_input(own: torch.Tensor, reference: torch.Tensor, source: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse shapes and types that no implementation can add; sources are not looked at."""
    for name, x, dtype in (
        ("own", own, torch.float32), ("reference", reference, torch.float32),
        ("source", source, torch.int64), ("scale", scale, torch.float32),
    ):  # fmt: skip
        if x.dtype != dtype:
            raise TypeError(f"align: {name} must be {dtype}, got {x.dtype}")
        if x.device != own.device:
            raise ValueError(f"align: {name} is on {x.device}, own on {own.device}")
    if own.ndim != 2 or reference.ndim != 2 or own.shape[1] != reference.shape[1]:
        raise ValueError(
            f"align: own and reference must be [n, components] and [m, components], got {tuple(own.shape)} and "
            f"{tuple(reference.shape)}"
        )
    if source.shape != own.shape[:1] or scale.shape != own.shape[:1]:
        raise ValueError(
            f"align: source and scale must be [{len(own)}], got {tuple(source.shape)} and {tuple(scale.shape)}"
        )
