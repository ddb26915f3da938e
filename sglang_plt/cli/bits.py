"""``sglang-plt bits``: bits a token of a text, of its KV in every codec, and what that comes to for long prompts."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from sglang_plt.cli.arguments import add_model_path, check_model_path
from sglang_plt.cli.errors import UserError, no_profile
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model

NAME = "bits"
HELP = "Measure the bits a token of a text and of its KV in every codec, and project what long prompts would take."

_DEFAULT = ("raw", "int4", "fast", "dense")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_path(parser)
    parser.add_argument(
        "--codec",
        nargs="+",
        choices=(*CODECS, *PROFILED, "all"),
        help="codecs to measure (default: raw and int4, and of fast and dense those that have a profile)",
    )
    parser.add_argument(
        "--profile", metavar="PATH", type=Path, help="profile, or directory of profiles (default: where servers look)"
    )
    parser.add_argument("--context", metavar="N", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--windows", metavar="N", type=int, default=6, help="places in the text (default: 6)")
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 text to measure on (default: documentation, code and chat)"
    )
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=3, help="rounds of the speed measurement; 0 for none (default: 3)"
    )
    parser.add_argument(
        "--link-gb-s",
        metavar="X",
        type=float,
        default=50.0,
        help="assumed link from host memory to a GPU, 10^9 bytes a second (default: 50, of PCIe 5.0 x16)",
    )
    parser.add_argument(
        "--prefill-tflops",
        metavar="X",
        type=float,
        default=400.0,
        help="assumed rate of a prefill, 10^12 operations a second (default: 400, sustained on one H100 or H200)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")


def run(args: argparse.Namespace) -> int:
    _check(args)

    from sglang_plt.codec import ProfileError
    from sglang_plt.quality import QualityError
    from sglang_plt.quality.bits import Sample, measure, measure_times, rows_of, table
    from sglang_plt.quality.model import ReferenceModel
    from sglang_plt.quality.profiles import load_profiles
    from sglang_plt.quality.seed import seed_cells, seed_rows, seed_table
    from sglang_plt.quality.texts import SOURCES, builtin_windows, file_windows
    from sglang_plt.results import Row, write_rows

    asked = (*CODECS, *PROFILED) if args.codec and "all" in args.codec else tuple(dict.fromkeys(args.codec or _DEFAULT))
    try:
        path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        model = ReferenceModel(path)
        if args.context > model.max_positions:
            raise UserError(
                f"--context={args.context} is more than the {model.max_positions} positions of the model: lower it"
            )
        if args.text is None:
            windows = builtin_windows(model.tokenizer, args.windows, args.context)
        else:
            windows = file_windows(model.tokenizer, args.text, args.windows, args.context)
        profiles = load_profiles(path, model, [name for name in asked if name in PROFILED], args.profile)
        missing = [name for name in asked if name in PROFILED and name not in profiles]
        if missing and args.codec and "all" not in args.codec:
            raise no_profile(missing[0])
        if missing:
            _say(f"without {' and '.join(missing)}: no profile of this model; make one with sglang-plt calibrate")
        codecs = [name for name in asked if name not in missing]
        _say(f"{path}: float32; text: {args.text or SOURCES}")

        def on_window(index: int, found: Sample) -> None:
            bits = ", ".join(f"{name} {number:.0f}" for name, number in found.bits.items())
            _say(
                f"window {index + 1} of {len(windows)} ({windows[index].kind}): bits a token: surprisal "
                f"{found.surprisal:.2f}, {bits}"
            )

        rows = rows_of(measure(model, windows, codecs, profiles, on_window))
        if args.repeats:
            _say(f"speed, {args.repeats} rounds")
            rows += measure_times(model, windows, args.context, codecs, profiles, args.repeats)
    except (QualityError, DemoModelError, ProfileError) as error:
        raise UserError(str(error)) from error
    cells = seed_cells(rows, args.link_gb_s, args.prefill_tflops)
    print(f"{len(windows)} windows of {args.context} tokens, KV in float32, one thread")
    print(table(rows))
    groups = {name: profile.info.group for name, profile in profiles.items()}
    print(f"\n{seed_table(cells, args.link_gb_s, args.prefill_tflops, groups)}")
    if args.json is not None:
        assumed = [
            Row("link_gb_per_s", "assumed", args.link_gb_s, "GB/s", n=0),
            Row("prefill_tflops", "assumed", args.prefill_tflops, "TFLOP/s", n=0),
        ]
        try:
            write_rows(args.json, [*rows, *seed_rows(cells), *assumed])
        except OSError as error:
            raise UserError(f"--json={args.json} cannot be written: {error.strerror}") from error
        _say(f"wrote {args.json}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.context < 5:
        raise UserError(f"--context={args.context} must be at least 5: the first four tokens stay exact")
    if args.windows < 1:
        raise UserError(f"--windows={args.windows} must be at least 1")
    if args.repeats < 0:
        raise UserError(f"--repeats={args.repeats} must not be negative")
    for name in ("link_gb_s", "prefill_tflops"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name.replace('_', '-')}={value:g} must be a positive number")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    check_model_path(args)
    if args.profile is not None and not args.profile.exists():
        raise UserError(f"--profile={args.profile} does not exist; make one with sglang-plt calibrate")


def _say(line: str) -> None:
    print(f"{NAME}: {line}", file=sys.stderr, flush=True)
