"""On a machine with one NVIDIA GPU, PyTorch and Triton: kernels against their specification, then bandwidth.

``python -m triton_ops.device_check --json FILE [--seconds 420]`` goes on where FILE says an earlier run stopped, and
writes the same as a table beside it, FILE with ``.md`` for its suffix. Without a GPU every number stays empty and both
say so. Block sizes are tuned on the way; see :mod:`triton_ops.tuning`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from triton_ops import rope
from triton_ops.device_kernels import kernel_checks, unit_speed
from triton_ops.device_speed import GEOMETRY, TOKENS, bandwidth, pool, restore_ms, seconds, tuned
from triton_ops.device_table import NO_GPU, table
from triton_ops.int_groups import reference
from triton_ops.int_groups.blocks import Block, sections
from triton_ops.int_groups.kernel import decode
from triton_ops.int_groups.kernel_encode import encode
from triton_ops.paged.reference import to_float, to_pool
from triton_ops.report.cases import SHAPES, VARIANTS, Shape
from triton_ops.report.cases import rotation as small_rotation


def check(shape: Shape, bits: int, device: torch.device) -> bool:
    """100 rows there and back; True when codes, and rows decoded elsewhere, have the specification's bits."""
    shape = replace(shape, layers=2)
    keys = pool(shape, shape.dim, 512, device)
    values = pool(shape, shape.v_dim, 512, device) if shape.v_dim else None
    turn = small_rotation(shape)
    turn = None if turn is None else rope.Rotation(turn.cos_sin.to(device), turn.is_neox)
    begins = sections(keys, values, bits, 100, 0)
    payload = torch.zeros(shape.layers * begins[6], dtype=torch.uint8, device=device)
    slots = torch.randperm(512, device=device)[:200]
    here, there = slots[:100].contiguous(), slots[100:].contiguous()
    positions = torch.arange(100, device=device)
    before = [(keys.gather(i, here), values.gather(i, here) if values is not None else None) for i in range(2)]
    if encode(payload, [Block(0, 100, 0, 0, 100, 0)], keys, values, here, bits, turn).any():
        return False
    decode(payload, [Block(0, 100, 0, 0, 100, 28)], keys, values, there, bits, turn)
    for layer, (k, v) in enumerate(before):
        rows = to_float(k) if turn is None else rope.undo(turn, to_float(k), positions)
        params, codes = reference.encode_keys(rows, bits)
        record = payload[layer * begins[6] : (layer + 1) * begins[6]]
        rows = reference.decode_keys(params, codes, bits)
        rows = rows if turn is None else rope.apply(turn, rows, positions + 28)
        good = torch.equal(record[begins[4] : begins[4] + codes.numel()], codes.flatten())
        good &= torch.equal(record[begins[2] : begins[3]], params.flatten().view(torch.uint8))
        good &= _same(keys.gather(layer, there), to_pool(rows, shape.dtype))
        if values is not None and v is not None:
            params, codes = reference.encode_values(to_float(v), bits)
            good &= torch.equal(record[begins[5] : begins[5] + codes.numel()], codes.flatten())
            rows = to_pool(reference.decode_values(params, codes, bits), shape.dtype)
            good &= _same(values.gather(layer, there), rows)
        if not good:
            return False
    return True


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def attention(device: torch.device) -> bool | None:
    """FlashInfer's paged decode over restored rows against torch's; None where it cannot be imported."""
    try:
        import flashinfer
    except ImportError:
        return None
    shape = Shape(8, 128, 128, 128, page=16, layers=1)
    keys, values = pool(shape, 128, 1024, device), pool(shape, 128, 1024, device)
    payload = torch.zeros(4 * sections(keys, values, 8, 256, 0)[6], dtype=torch.uint8, device=device)
    blocks = [Block(i * len(payload) // 4, 256, 0, 0, 256, 256 * i) for i in range(4)]
    slots = torch.arange(1024, device=device)
    encode(payload, blocks, keys, values, slots, 8)
    decode(payload, blocks, keys, values, slots, 8)
    query = torch.randn(1, 8, 128, device=device, dtype=torch.bfloat16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8, device=device), "NHD")
    numbers = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 64], list(range(64)), [16])]
    wrapper.plan(*numbers, 8, 8, 128, 16, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    got = wrapper.run(query, (keys.views[0], values.views[0]))[0].float()
    k, v = (x.gather(0, slots).float().transpose(0, 1) for x in (keys, values))
    want = torch.nn.functional.scaled_dot_product_attention(query[0, :, None].float(), k, v)[:, 0]
    return bool((got - want).abs().max() < 2e-2)


def steps(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Everything there is to do, by name, the most telling first."""
    found: dict[str, Callable[[], Any]] = {}
    for name, shape in {**SHAPES, **VARIANTS}.items():
        for bits in (4, 8):
            found[f"check/{name}-int{bits}"] = partial(check, shape, bits, device)
    found |= kernel_checks(device)
    for name in GEOMETRY:
        for bits in (8, 4):
            found[f"tuned/{name}-int{bits}"] = partial(tuned, name, bits, device)
            found[f"restore_ms/{name}-int{bits}-{TOKENS[0]}"] = partial(restore_ms, name, bits, device)
    found["unit/llama-3.1-8b"] = partial(unit_speed, seconds, device)
    for tokens in TOKENS:
        for name in GEOMETRY:
            for bits in (8, 4):
                found[f"GB_per_s/{name}-int{bits}-{tokens}"] = partial(bandwidth, name, tokens, bits, device)
    found["flashinfer/attention"] = partial(attention, device)
    return found


def write(results: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(table(results), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m triton_ops.device_check", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, and where to go on")
    parser.add_argument("--seconds", type=float, default=420, help="begin nothing after this long (%(default)s)")
    options = parser.parse_args(arguments)
    begin, available = time.monotonic(), torch.cuda.is_available()
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    results["device"] = torch.cuda.get_device_name() if available else NO_GPU
    for name, step in steps(torch.device("cuda")).items():
        results.setdefault(name, None)
        if available and results[name] is None and time.monotonic() - begin < options.seconds:
            try:
                results[name] = step()
            except Exception as error:  # the other steps still tell something
                results[name] = f"{type(error).__name__}: {error}"
            write(results, options.json)
        print(f"{name:45} {results[name]}", flush=True)
    write(results, options.json)
    print(results["device"])
    return int(any(result is False or isinstance(result, str) for name, result in results.items() if name != "device"))


if __name__ == "__main__":
    sys.exit(main())
