"""Compiles traced launches for three GPUs, without one, and reads their machine code. Needs no ``TRITON_INTERPRET``.

``ptxas`` and ``cuobjdump`` are those of the triton wheel.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
KINDS = {
    "load": r"LDG|LD\b|LDGSTS|UTMALDG",
    "store": r"STG|ST\b|UTMASTG",
    "shared": r"LDS|STS|LDSM|STSM|BAR",
    "local": r"LDL|STL",
    "mma": r"[A-Z]*MMA",
    "fp32": r"FADD|FMUL|FFMA|FSEL|FMNMX|FSETP|FSET|FCHK|MUFU|FSWZADD|HADD2|HMUL2|HFMA2|HMNMX2|HSETP2",
    "convert": r"F2F|F2I|I2F|F2FP|I2FP|FRND",
    "branch": r"BRA|BSSY|BSYNC|EXIT|CALL|RET|WARPSYNC|NOP",
}
"""Kinds of instruction by the beginning of their name; what is in none is ``integer``."""


def compile_record(record: dict[str, Any], capability: int) -> dict[str, float]:
    """Numbers of one launch on one GPU: registers, spills, shared memory, instructions by kind."""
    module, name = record["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    attributes = {(index,): [["tt.divisibility", 16]] for index in record["divisible"]}
    source = ASTSource(kernel, record["signature"], record["constants"], attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=record["options"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, code = _cuobjdump("-res-usage", cubin), _cuobjdump("-sass", cubin)
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    counts = instructions(code)
    return {
        "registers": int(numbers["REG"]),
        "spills": int(numbers["STACK"]) + int(numbers["LOCAL"]) + counts["local"],
        "shared_bytes": compiled.metadata.shared,
        **{f"instructions_{kind}": counts[kind] for kind in (*KINDS, "integer")},
    }


def _cuobjdump(option: str, cubin: Path) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, str(cubin)], check=True, capture_output=True, text=True).stdout


def instructions(code: str) -> Counter[str]:
    """How many instructions of each kind a disassembly has."""
    counts: Counter[str] = Counter()
    for name in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+ )?([A-Z][A-Z0-9]*)", code, re.MULTILINE):
        kind = next((kind for kind, pattern in KINDS.items() if re.match(f"(?:{pattern})", name)), "integer")
        counts[kind] += 1
    return counts


def main() -> None:
    """Records from standard input, the same with ``compiled`` by capability to standard output, as JSON."""
    records = json.load(sys.stdin)
    for number, record in enumerate(records):
        name = record["kernel"].split(":")[1]
        print(f"kernels: {number + 1} of {len(records)}: {name} {record['config']}", file=sys.stderr)
        record["compiled"] = {capability: compile_record(record, capability) for capability in CAPABILITIES}
    json.dump({"triton": triton.__version__, "records": records}, sys.stdout)


if __name__ == "__main__":
    main()
