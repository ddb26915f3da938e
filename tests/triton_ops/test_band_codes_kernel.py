"""Triton decoder of band codes against its specification, bit for bit."""

import numpy as np
import pytest
import torch

from triton_ops.band_codes import BAND, Bands, kernel, packed_bytes, to_components


def block(rows: int, widths: list[int], outliers: int) -> Bands:
    generator = np.random.default_rng(rows)
    numbers = np.array(widths, np.uint8)
    where = np.sort(generator.choice(rows * BAND * len(widths), outliers, replace=False)).astype(np.int64)
    return Bands(
        rows,
        numbers,
        generator.integers(40, 90, len(widths), np.uint8),
        generator.integers(0, 256, packed_bytes(numbers, rows), np.uint8),
        where,
        generator.normal(size=outliers).astype(np.float16),
    )


@pytest.mark.parametrize(("rows", "start", "stop"), [(1, 0, 1), (70, 0, 70), (70, 3, 69), (256, 64, 64), (5, 4, 5)])
def test_every_width_decodes_to_the_bits_of_the_reference(rows, start, stop, device):
    bands = block(rows, list(range(13)), 9)
    got = torch.full((stop - start, 16 * 13), float("nan"), device=device)
    assert kernel.to_components(kernel.upload(bands, device), start, stop, got) is got
    assert torch.equal(got.cpu(), to_components(bands, start, stop))


@pytest.mark.parametrize("widths", [[], [0, 0], [12]])
def test_bands_without_codes_or_outliers(widths, device):
    bands = block(3, widths, 0)
    assert torch.equal(kernel.to_components(kernel.upload(bands, device), 0, 3).cpu(), to_components(bands, 0, 3))


def test_refuses_rows_outside_the_block(device):
    with pytest.raises(ValueError, match=r"0 <= start <= stop <= 3 rows, got 1\.\.4"):
        kernel.to_components(kernel.upload(block(3, [1], 0), device), 1, 4)
    with pytest.raises(ValueError, match=r"out must be contiguous float32 \(2, 16\), got torch\.float32 \(2, 17\)"):
        kernel.to_components(kernel.upload(block(3, [1], 0), device), 1, 3, torch.zeros(2, 17, device=device))
