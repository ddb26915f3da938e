"""Runs launches in Triton's interpreter and records what they would compile to and which bytes they touch.

Needs ``TRITON_INTERPRET=1`` before triton is imported. An access counts the distinct addresses of one load or store of
one program: a warp asks for a line once, however many of its threads want it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton
from triton._C.libtriton import ir
from triton.runtime import interpreter

from triton_ops.report.cases import Launch
from triton_ops.report.codec_cases import all_launches

_POINTERS = {
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Trace:
    """While it is entered, every launch becomes a record; see :meth:`records`."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self._operands: list[tuple[int, int]] = []
        self._saved: dict[str, Any] = {}

    def __enter__(self) -> Trace:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot
        binary, call = builder.binary_op, executor.__call__
        self._saved = {"load": load, "store": store, "dot": dot, "binary": binary, "call": call}

        def traced_load(this: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._access("read", ptrs, mask)
            return load(this, ptrs, mask, *rest)

        def traced_store(this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._access("written", ptrs, mask)
            return store(this, ptrs, value, mask, *rest)

        def traced_binary(this: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            result = binary(this, lhs, rhs, op)
            if lhs.dtype.scalar.is_floating() and op in (np.add, np.subtract, np.multiply, np.divide):
                self.launches[-1]["flops"] += result.data.size
            return result

        def traced_dot(this: Any, a: Any, b: Any, *rest: Any) -> Any:
            products = 3 if rest[1] == ir.INPUT_PRECISION.TF32x3 else 1
            self.launches[-1]["dot_flops"] += products * 2 * a.data.size * b.data.shape[-1]
            return dot(this, a, b, *rest)

        def traced_call(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.launches.append(_describe(this, args, kwargs))
            return call(this, *args, **kwargs)

        builder.create_masked_load, builder.create_masked_store = traced_load, traced_store
        builder.binary_op, builder.create_dot, executor.__call__ = traced_binary, traced_dot, traced_call
        return self

    def __exit__(self, *error: object) -> None:
        builder, saved = interpreter.InterpreterBuilder, self._saved
        builder.create_masked_load, builder.create_masked_store = saved["load"], saved["store"]
        builder.binary_op, builder.create_dot = saved["binary"], saved["dot"]
        interpreter.GridExecutor.__call__ = saved["call"]

    def _access(self, kind: str, ptrs: Any, mask: Any) -> None:
        where, mask_data = np.broadcast_arrays(ptrs.data, mask.data.astype(bool))  # & makes integers of masks
        addresses = np.unique(where[mask_data])
        item = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        launch = self.launches[-1]
        is_operand = len(addresses) and any(begin <= addresses[0] < end for begin, end in self._operands)
        launch["operands" if is_operand else kind] += len(addresses) * item
        launch["touched"][item].append(addresses)

    def run(self, launch: Launch) -> list[dict[str, Any]]:
        """Call a launch and give its :meth:`records`."""
        self._operands = [_range(tensor) for tensor in launch.operands + launch.matrices]
        launch.call()
        return self.records(launch)

    def records(self, launch: Launch) -> list[dict[str, Any]]:
        """What was launched since the last call, as JSON.

        Of each: kernel, config, what to compile, and a row's bytes ``read`` and ``written``; bytes of ``operands`` and
        matrices that all tiles read; ``minimum`` bytes, those of essential tensors that were touched, once; ``flops``
        without and ``dot_flops`` of products, a tf32x3 one being three.
        """
        found = []
        for record in self.launches:
            if launch.only and record["kernel"].split(":")[1] != launch.only:
                continue
            touched = record.pop("touched")
            minimum = _distinct_bytes(touched, launch.essential)
            record["read"] += _distinct_bytes(touched, launch.operands)
            for name in ("read", "written", "operands", "flops", "dot_flops"):
                record[name] /= launch.rows
            config = launch.config + _part(record["constants"])
            found.append({**record, "config": config, "minimum": minimum / launch.rows})
        self.launches.clear()
        return found


def _part(constants: dict[str, Any]) -> str:
    """Of kernels that are launched for keys and for values: which."""
    is_values = constants.get("VALUES", constants.get("BEGIN"))
    return "" if is_values is None else "-values" if is_values else "-keys"


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.untyped_storage().data_ptr()
    return begin, begin + tensor.untyped_storage().nbytes()


def _distinct_bytes(touched: dict[int, list[np.ndarray]], tensors: Sequence[torch.Tensor]) -> int:
    ranges = sorted({_range(tensor) for tensor in tensors})
    seen: list[np.ndarray] = [np.zeros(end - begin, bool) for begin, end in ranges]
    for item, accesses in touched.items():
        addresses = np.concatenate(accesses).astype(np.int64)
        for (begin, end), mask in zip(ranges, seen, strict=True):
            inside = addresses[(addresses >= begin) & (addresses < end)] - begin
            for byte in range(item):
                mask[inside + byte] = True
    return int(sum(mask.sum() for mask in seen))


def _describe(executor: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The kernel and what it is compiled for, as Triton's own launcher would specialise it."""
    named = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
    signature, constants, divisible = {}, {}, []
    for index, name in enumerate(executor.arg_names):
        value = named[name]
        if name in executor.constexprs or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(index)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                divisible.append(index)
    return {
        "kernel": f"{executor.fn.__module__}:{executor.fn.__name__}",
        "signature": signature,
        "constants": constants,
        "divisible": divisible,
        "options": {name: kwargs[name] for name in _OPTIONS if name in kwargs},
        **{"read": 0, "written": 0, "operands": 0, "flops": 0, "dot_flops": 0, "touched": defaultdict(list)},
    }


def main(wanted: list[str]) -> None:
    """Print the records of every launch whose config has one of ``wanted`` in it, or of all, as JSON."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("trace: triton was imported without TRITON_INTERPRET=1")
    records = []
    with Trace() as trace:
        for launch in all_launches():
            if not wanted or any(part in launch.config for part in wanted):
                records += trace.run(launch)
    json.dump(records, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
