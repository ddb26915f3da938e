"""Compile every Triton kernel in every configuration that ships, count what it moves, compare with the report.

Without a GPU: launches run in Triton's interpreter, which counts bytes, and compile for sm_80, sm_90 and sm_100. Exits
with 1 where a kernel spills, or uses more registers, shared memory or bytes a row than the report says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton_ops.report.rows import regressions, rows_of, table

REPORT = Path(__file__).with_name("report.json")


def measure(wanted: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Triton's version, and the rows of configurations with one of ``wanted`` in their name, or of all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "triton_ops.report.trace", *wanted]
    print("kernels: tracing in Triton's interpreter", file=sys.stderr)
    traced = subprocess.run(
        command, env={**environment, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    command = [sys.executable, "-m", "triton_ops.report.compiled"]
    done = subprocess.run(command, env=environment, input=traced, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = json.loads(done)
    return found["triton"], rows_of(found["records"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m triton_ops.report", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the committed report instead of comparing with it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="configurations with TEXT in their name")
    options = parser.parse_args(arguments)
    if options.update and options.only:
        parser.error("--update writes the whole report; leave out --only")
    version, rows = measure(options.only)
    print(table(rows))
    text = json.dumps({"triton": version, "rows": rows}, indent=None, allow_nan=False)
    text = text.replace('{"metric"', '\n{"metric"') + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    if options.update:
        REPORT.write_text(text, encoding="utf-8")
        return int(any(row["metric"] == "spills" and row["value"] for row in rows))
    committed = json.loads(REPORT.read_text(encoding="utf-8"))
    if committed["triton"] != version:
        print(f"kernels: the report is of triton {committed['triton']}, this is {version}", file=sys.stderr)
        return 1
    worse = regressions(rows, committed["rows"], complete=not options.only)
    for line in worse:
        print(f"kernels: {line}", file=sys.stderr)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
