"""On a machine with one NVIDIA GPU, PyTorch and Triton: kernels against their specification, then bandwidth.

``python -m triton_ops.device_check --json FILE [--seconds 420]`` goes on where FILE says an earlier run stopped.
Without a GPU every number stays empty and the report says so. Bandwidth is bytes of encoded rows and pool rows, each
once, over time; ``copy`` is a torch copy of as many bytes, half read and half written.
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
from triton_ops.int_groups import reference
from triton_ops.int_groups.blocks import Block, sections
from triton_ops.int_groups.kernel import decode
from triton_ops.int_groups.kernel_encode import encode
from triton_ops.paged import PagedPool
from triton_ops.paged.reference import to_float, to_pool
from triton_ops.report.cases import SHAPES, VARIANTS, Shape
from triton_ops.report.cases import rotation as small_rotation

GEOMETRY = {"llama-3.1-8b": (32, 8, 128), "llama-3.1-70b-tp8": (80, 1, 128)}
TOKENS = (8192, 32768, 131072)
BLOCK_ROWS = 256


def pool(shape: Shape, dim: int, slots: int, device: torch.device) -> PagedPool:
    pages = slots // shape.page
    form = (pages, shape.page, shape.heads, dim) if shape.layout == "nhd" else (pages, shape.heads, shape.page, dim)
    rows = [torch.randn(form, device=device).to(shape.dtype) for _ in range(shape.layers)]
    return PagedPool.nhd(rows) if shape.layout == "nhd" else PagedPool.hnd(rows)


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


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call on the GPU, after two that do not count."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def bandwidth(name: str, tokens: int, bits: int, device: torch.device) -> dict[str, float]:
    """GB/s of encode and decode of ``tokens`` in scattered slots, and of a copy."""
    layers, heads, dim = GEOMETRY[name]
    group = min(layers, max(1, 2**33 // (tokens * heads * dim * 4)))  # layers at a time: 8 GB of pool
    shape = Shape(heads, dim, dim, dim, layers=group)
    keys, values = pool(shape, dim, tokens, device), pool(shape, dim, tokens, device)
    angles = torch.outer(torch.arange(tokens, device=device), 5e5 ** (-torch.arange(0, dim, 2, device=device) / dim))
    turn = rope.Rotation(torch.cat((angles.cos(), angles.sin()), 1).float())
    size = group * sections(keys, values, bits, BLOCK_ROWS, 0)[6]
    blocks = [Block(i * size, BLOCK_ROWS, 0, 0, BLOCK_ROWS, i * BLOCK_ROWS) for i in range(tokens // BLOCK_ROWS)]
    payload = torch.zeros(len(blocks) * size, dtype=torch.uint8, device=device)
    slots = torch.randperm(tokens, device=device)
    moved = len(payload) + 2 * group * keys.views[0].nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {
        "encode": seconds(lambda: encode(payload, blocks, keys, values, slots, bits, turn)),
        "decode": seconds(lambda: decode(payload, blocks, keys, values, slots, bits, turn)),
        "copy": seconds(lambda: target.copy_(source)),
    }
    return {what: moved / time_s / 1e9 for what, time_s in found.items()}


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
    for tokens in TOKENS:
        for name in GEOMETRY:
            for bits in (8, 4):
                found[f"GB_per_s/{name}-int{bits}-{tokens}"] = partial(bandwidth, name, tokens, bits, device)
    found["flashinfer/attention"] = partial(attention, device)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m triton_ops.device_check", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, and where to go on")
    parser.add_argument("--seconds", type=float, default=420, help="begin nothing after this long (%(default)s)")
    options = parser.parse_args(arguments)
    begin, available = time.monotonic(), torch.cuda.is_available()
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    results["device"] = torch.cuda.get_device_name() if available else "no GPU: nothing was run"
    for name, step in steps(torch.device("cuda")).items():
        results.setdefault(name, None)
        if available and results[name] is None and time.monotonic() - begin < options.seconds:
            try:
                results[name] = step()
            except Exception as error:  # the other steps still tell something
                results[name] = f"{type(error).__name__}: {error}"
            options.json.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{name:45} {results[name]}", flush=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(results["device"])
    return int(any(result is False or isinstance(result, str) for name, result in results.items() if name != "device"))


if __name__ == "__main__":
    sys.exit(main())
