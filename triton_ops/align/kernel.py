"""Triton kernel that adds rows of reference blocks; bit for bit :func:`triton_ops.align.reference.add_rows`.

A kernel of its own, between what makes components and the transform. Fused into the unpacking of fixed-width codes it
would never run: differences are entropy-coded whatever the codec, and reach the GPU as components. Fused into the
transform it would read the references once for every tile of channels instead of once. What it costs is one write and
one read of the components. It also takes the columns of one unit out of wider rows; the transform wants them side by
side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.align.reference import check_input

_ELEMENTS = 4096
_COLUMNS = 1024


@triton.jit
def add_rows_kernel(
    own_ptr, reference_ptr, source_ptr, scale_ptr, out_ptr, num_rows, own_stride, reference_stride, out_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows, ``COLUMNS`` components."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = here[:, None] & (column < WIDTH)[None, :]
    source = tl.load(source_ptr + row, mask=here, other=-1)
    has = source >= 0
    scale = tl.load(scale_ptr + row, mask=has, other=0.0)
    x = tl.load(own_ptr + row[:, None] * own_stride + column[None, :], mask=mask, other=0.0)
    at = reference_ptr + source[:, None] * reference_stride + column[None, :]
    y = tl.load(at, mask=mask & has[:, None], other=0.0)
    x = tl.where(has[:, None], x + scale[:, None] * y, x)
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], x, mask=mask)


def add_rows(
    own: torch.Tensor,
    reference: torch.Tensor,
    source: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments, result and errors as :func:`triton_ops.align.reference.add_rows`, except:

    Args:
        own, reference: rows may lie apart, components side by side.
        source: not checked for bounds: that would cost a device synchronisation.
        out: where to write, like ``own``, which it may be; None for a new tensor.

    Raises:
        RuntimeError: a CPU without Triton's interpreter.
    """
    check_input(own, reference, source, scale)
    out = torch.empty(own.shape, device=own.device) if out is None else out
    if out.shape != own.shape or out.dtype != torch.float32 or out.device != own.device:
        raise ValueError(f"align: out must be float32 {tuple(own.shape)}, got {out.dtype} {tuple(out.shape)}")
    for name, x in (("own", own), ("reference", reference), ("out", out)):
        if x.shape[1] > 1 and x.stride(1) != 1:
            raise ValueError(f"align: components of {name} must lie side by side, got strides {x.stride()}")
    if not source.is_contiguous() or not scale.is_contiguous():
        raise ValueError("align: source and scale must be contiguous")
    if own.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError("triton_ops: a CPU needs Triton's interpreter, TRITON_INTERPRET=1")
    if not out.numel():
        return out
    num_rows, width = own.shape
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    rows = _ELEMENTS // columns
    add_rows_kernel[-(-num_rows // rows), -(-width // columns)](
        own, reference, source, scale, out, num_rows, own.stride(0), reference.stride(0), out.stride(0),
        WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
