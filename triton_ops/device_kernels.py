"""On a GPU: the kernels between a calibrated block and the pool, and of rotated codes, against their specification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from triton_ops import band_codes, rope
from triton_ops.align import kernel as align
from triton_ops.align import reference as align_reference
from triton_ops.band_codes import Bands
from triton_ops.band_codes import kernel as bands_kernel
from triton_ops.paged import PagedPool
from triton_ops.paged.reference import to_pool
from triton_ops.report.cases import SHAPES, VARIANTS, Shape, pool
from triton_ops.report.cases import rotation as small_rotation
from triton_ops.rotated import kernel as rotated_kernel
from triton_ops.rotated import reference as rotated
from triton_ops.transform import reference as transform
from triton_ops.transform.kernel import restore_unit

_ROWS = 100
_CPU = torch.device("cpu")


def kernel_checks(device: torch.device) -> dict[str, Callable[[], bool]]:
    """By name; each says whether the bits are those of the specification."""
    found: dict[str, Callable[[], bool]] = {
        "check/bands": partial(check_bands, device),
        "check/align": partial(check_align, device),
    }
    for name, shape in {**SHAPES, **VARIANTS}.items():
        found[f"check/{name}-unit"] = partial(check_unit, shape, device)
        found[f"check/{name}-rotated"] = partial(check_rotated, shape, device)
    return found


def check_bands(device: torch.device) -> bool:
    """Every width, with outliers."""
    generator = np.random.default_rng(0)
    widths: np.ndarray = np.arange(band_codes.MAX_WIDTH + 1, dtype=np.uint8)
    packed = generator.integers(0, 256, band_codes.packed_bytes(widths, _ROWS), np.uint8)
    where: np.ndarray = np.arange(0, _ROWS * widths.size * band_codes.BAND, 37, dtype=np.int64)
    scales = generator.integers(40, 90, len(widths), np.uint8)
    bands = Bands(_ROWS, widths, scales, packed, where, generator.normal(size=len(where)).astype(np.float16))
    got = bands_kernel.to_components(bands_kernel.upload(bands, device), 3, _ROWS)
    return torch.equal(got.cpu(), band_codes.to_components(bands, 3, _ROWS))


def check_align(device: torch.device) -> bool:
    own, rows = torch.randn(_ROWS, 2050), torch.randn(30, 2050)
    source, scale = torch.randint(-1, 30, (_ROWS,)), torch.rand(_ROWS)
    got = align.add_rows(*(x.to(device) for x in (own, rows, source, scale)))
    return torch.equal(got.cpu(), align_reference.add_rows(own, rows, source, scale))


def check_unit(shape: Shape, device: torch.device) -> bool:
    """Whole numbers, so that sums in any order are the same; rotation included."""
    shape = replace(shape, layers=2)
    layer_width = shape.heads * (shape.dim + shape.v_dim)

    def whole(*form: int) -> torch.Tensor:
        return torch.randint(-3, 4, form).float()

    unit = transform.Unit(whole(64, layer_width), whole(32, layer_width), whole(layer_width))
    components, below = whole(_ROWS, 64), whole(_ROWS, 32)
    moved = transform.Unit(
        *(part if part is None else part.to(device) for part in (unit.basis, unit.weights, unit.bias))
    )
    slots = torch.randperm(128)[:_ROWS]
    (want_keys, want_values), (keys, values) = _pools(shape, _CPU), _pools(shape, device)
    rows = transform.synthesise(components, 0.5, below, unit)
    transform.scatter(rows, 1, want_keys, want_values, slots, 5, _rotation(shape, _CPU))
    components, below, slots = (x.to(device) for x in (components, below, slots))
    restore_unit(components, 0.5, below, moved, 1, keys, values, slots, 5, _rotation(shape, device))
    return _same(keys, want_keys) and (values is None or want_values is None or _same(values, want_values))


def check_rotated(shape: Shape, device: torch.device) -> bool:
    shape = replace(shape, layers=1)
    widths = [1 + head % 8 for head in range(shape.heads)]
    parts = [rotated.encode(torch.randn(_ROWS, 1, shape.dim), width) for width in widths]
    want, got = _pools(shape, _CPU)[0], _pools(shape, device)[0]
    slots, turn = torch.randperm(128)[:_ROWS], _rotation(shape, _CPU)
    decoded = [rotated.decode(*part, width, shape.dim) for part, width in zip(parts, widths, strict=True)]
    rows = torch.cat(decoded, 1)
    rows = rows if turn is None else rope.apply(turn, rows, torch.arange(_ROWS) + 5)
    norms = torch.stack([norm.flatten() for norm, _ in parts])[None].to(device)
    codes = torch.cat([code.flatten() for _, code in parts]).to(device)
    want.scatter(0, slots, to_pool(rows, shape.dtype))
    rotated_kernel.decode(norms, codes, widths, got, slots.to(device), 5, _rotation(shape, device))
    return _same(got, want)


def unit_speed(seconds: Callable[..., float], device: torch.device) -> dict[str, Any]:
    """Restore of one layer of Llama-3.1-8B from 8192 rows of components; Tflop/s count a product once."""
    shape, rows = replace(SHAPES["llama-8b"], layers=1), 8192
    width = shape.heads * (shape.dim + shape.v_dim)
    unit = transform.Unit(torch.randn(width, width, device=device), torch.randn(width, width, device=device),
                          torch.randn(width, device=device))  # fmt: skip
    form = (rows, shape.heads, shape.dim)
    keys, values = (PagedPool.nhd([torch.empty(form, dtype=shape.dtype, device=device)]) for _ in range(2))
    components, below = (torch.randn(rows, width, device=device) for _ in range(2))
    kept, slots = torch.empty(rows, width, device=device), torch.randperm(rows, device=device)
    table = torch.rand(rows, shape.rotary, device=device)
    turn = rope.Rotation(table)
    time_s = seconds(lambda: restore_unit(components, 1.0, below, unit, 0, keys, values, slots, 0, turn, kept))
    product_s = seconds(lambda: torch.addmm(components @ unit.basis, below, unit.weights))
    return {"ms": time_s * 1e3, "torch_products_ms": product_s * 1e3, "tflops": 4 * rows * width**2 / time_s / 1e12}


def _pools(shape: Shape, device: torch.device) -> tuple[PagedPool, PagedPool | None]:
    def made(dim: int) -> PagedPool:
        return PagedPool(tuple(view.to(device) for view in pool(shape, dim).views))

    return made(shape.dim), made(shape.v_dim) if shape.v_dim else None


def _rotation(shape: Shape, device: torch.device) -> rope.Rotation | None:
    turn = small_rotation(shape)
    return None if turn is None else rope.Rotation(turn.cos_sin.to(device), turn.is_neox)


def _same(got: PagedPool, want: PagedPool) -> bool:
    pairs = zip(got.views, want.views, strict=True)
    return all(torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)
