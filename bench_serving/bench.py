"""Prefix caches side by side: SGLang's own and this package's, at equal bytes, one server at a time.

    python -m bench_serving.bench [--workloads agents multi_turn] [--arms default plt-raw plt-dense] [--repeats N]
    python -m bench_serving.bench --url http://127.0.0.1:30000    # one server that runs already
    python -m bench_serving.bench --report-only DIR

``plt-raw`` is what a host tier of plain rows does. Under ``pressure`` the working set is four times the bytes that
every arm has; with ``fits`` all of it fits into the pool. What is measured is in :mod:`bench_serving.bench_rows`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench_serving.bench_files import Directory, Run
from bench_serving.bench_plan import ALL_ARMS, ARMS, AS_IS, FITS, PRESSURE, SIZED, BenchError, Plan, Sized, factor_of
from bench_serving.bench_report import REPORT, write_report
from bench_serving.bench_runs import run_all, run_url
from bench_serving.figures import FigureError
from bench_serving.fleet_runs import FleetError
from bench_serving.servers import Arm
from bench_serving.streams import Api, Completions, Generate
from bench_serving.workloads import ModelTokenizer
from sglang_plt.client import Client, RequestError
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model
from sglang_plt.results import write_rows
from sglang_plt.serving import ServerStartError

_EXPECTED = (BenchError, DemoModelError, FigureError, FleetError, RequestError, ServerStartError, ValueError, OSError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench_serving.bench")
    add = parser.add_argument
    add("--workloads", nargs="+", choices=list(SIZED), default=list(SIZED), help=f"default: {' '.join(SIZED)}")
    add("--arms", nargs="+", metavar="ARM", default=list(ARMS), help=f"default: {' '.join(ARMS)}; all: all of them")
    add("--pressure", nargs="*", type=float, metavar="FACTOR", help="working set over bytes (default: 4); see --fits")
    add("--fits", action="store_true", help="all fits into the pool; without --pressure and --fits, both are measured")
    add("--repeats", type=int, default=1, metavar="N", help="servers of each kind, in rotated order (default: 1)")
    add("--scale", type=float, default=1.0, metavar="S", help="sessions, as a multiple of the default ones")
    add("--seed", type=int, default=0, help="of the texts (default: 0)")
    add("--model-path", type=Path, help=f"model directory (default: {DEFAULT_DEMO_MODEL}, fetched)")
    add("--output", type=Path, metavar="DIR", help="new directory for records and report (default: in build/bench)")
    add("--json", type=Path, metavar="FILE", help="write the rows to this file as well")
    add("--report-only", type=Path, metavar="DIR", help="make the report of a run again, from its records")
    add("--url", help="measure this server, which runs already and whose tokenizer is that of --model-path")
    add("--api", choices=("generate", "completions"), default="generate", help="of --url: SGLang's or OpenAI's")
    add("--name", default="server", help="of the server at --url, in tables (default: server)")
    return parser


def _conditions(pressure: Sequence[float] | None, fits: bool) -> list[str]:
    """By name; the factor of ``pressure`` itself is left out."""
    if pressure is None and not fits:
        return [PRESSURE, FITS]
    names = [PRESSURE] if pressure == [] else [f"{PRESSURE}-{factor:g}" for factor in pressure or ()]
    plain = f"{PRESSURE}-{factor_of(PRESSURE):g}"
    found = [PRESSURE if name == plain else name for name in names]
    return list(dict.fromkeys([*found, FITS] if fits else found))


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(argv)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    if args.repeats < 1 or not 0 < args.scale < 1000:
        parser.error("--repeats must be at least 1, and --scale above 0")
    root = args.report_only or args.output or Path("build/bench") / time.strftime("%Y%m%d-%H%M%S")
    failed: Exception | None = None
    try:
        if args.report_only is None:
            if root.exists() and any(root.iterdir()):
                raise BenchError(f"--output={root} is not empty: choose another directory, or remove it")
            try:
                _measure(args, shlex.join(argv), root)
            except _EXPECTED as error:
                if not (root / "records").is_dir():
                    raise
                failed = error  # what has been measured is still reported
        elif not root.is_dir():
            raise BenchError(f"--report-only={root} is not a directory")
        rows, text = write_report(root)
        if args.json is not None:
            write_rows(args.json, rows)
        print(text)
        _say(f"report: {root / REPORT}")
    except _EXPECTED as error:
        failed = failed or error
    if failed is not None:
        parser.exit(2, f"{parser.prog}: error: {failed}\n")


def _measure(args: argparse.Namespace, command: str, root: Path) -> None:
    arms = list(dict.fromkeys(ALL_ARMS if args.arms == ["all"] else args.arms))
    for arm in arms:
        Arm.parse(arm)
    model_path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
    tokenizer = ModelTokenizer(model_path)
    workloads = [Sized.make(name, tokenizer, args.scale, args.seed) for name in dict.fromkeys(args.workloads)]
    sizes = {
        w.name: {
            "sessions": len(w.sessions),
            "requests": w.num_requests,
            "working_set": w.working_set,
            "longest": w.longest,
        }
        for w in workloads
    }
    if args.url is not None:
        run = Run(_setup(model_path.name), command, sizes, {AS_IS: {}}, [args.name])
        client = Client(args.url.rstrip("/"))
        api = _api(args.api, client)
        list(run_url(client, api, workloads, run, Directory(root), args.repeats, _say))
        return
    plan = Plan.make(model_path, workloads, _conditions(args.pressure, args.fits), on_gpu=_has_gpu())
    budgets = {
        name: {"pool_tokens": b.pool_tokens, "cold_bytes": b.cold_bytes, "row_bytes": b.row_bytes}
        for name, b in plan.budgets.items()
    }
    run = Run(_setup(model_path.name), command, sizes, budgets, arms)
    for condition in budgets:
        wanted = factor_of(condition)
        for name in sizes:
            pressure = run.pressure(name, condition) or 0.0
            _say(f"{condition}: the working set of {name} is {pressure:.2f} times the bytes of every arm")
            if wanted is not None and pressure < 0.97 * wanted:
                _say(f"  that is less than {wanted:g}: a larger --scale has more sessions")
    for note in run_all(plan, run, Directory(root), args.repeats, _say):
        if run.disturbed(note):
            others = "unknown" if note.others is None else f"{note.others:.0%}"
            _say(f"{note.arm}, {note.condition}: DISTURBED, probe {run.probe_ratio(note):.2f}, others {others}")


def _api(name: str, client: Client) -> Api:
    if name == "generate":
        return Generate()
    return Completions(client.get_json("/v1/models")["data"][0]["id"])


def _setup(model: str) -> list[str]:
    """What a reader needs to know of model, machine and versions."""
    cpu = next((line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "sglang-plt", "torch"))
    machine = f"{cores} cores of {cpu or platform.machine()}, Python {platform.python_version()}, {versions}"
    return [f"Model: {model}. Measured {time.strftime('%Y-%m-%d %H:%M')} on {machine}."]


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
