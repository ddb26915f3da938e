"""``sglang-plt rate-distortion``: bits against divergence for our codecs and for published methods."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_plt.cli.arguments import add_model_path, check_model_path
from sglang_plt.cli.errors import UserError
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model

if TYPE_CHECKING:
    from sglang_plt.quality.rate_distortion import Sample
    from sglang_plt.quality.texts import Window

NAME = "rate-distortion"
HELP = "Measure bits against divergence for every codec and for published methods, and how fast the codecs are."

_CONTEXTS = (1024, 4096)
_WINDOWS, _LONG_WINDOWS = 24, 12  # contexts of up to 2048 tokens, and longer ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_path(parser)
    parser.add_argument(
        "--profile",
        metavar="PATH",
        type=Path,
        help="profile, or directory of profiles, for our codecs (default: fitted)",
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"{', '.join((*CODECS, *PROFILED))}, or published methods: int, kivi, rotated, rotated-fisher, kvtc, aqua "
        "(default: all)",
    )
    parser.add_argument(
        "--context",
        metavar="N",
        nargs="+",
        type=int,
        default=_CONTEXTS,
        help="tokens of the prefix (default: 1024 4096)",
    )
    parser.add_argument(
        "--continuation", metavar="N", type=int, default=256, help="tokens behind it that are compared (default: 256)"
    )
    parser.add_argument(
        "--windows", metavar="N", type=int, help="places in the text (default: 24, or 12 beyond 2048 tokens)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=65536, help="tokens to calibrate on (default: 65536)"
    )
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="keep the calibration pass here, and take it up again"
    )
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=5, help="rounds of the speed measurement; 0 for none (default: 5)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw them, for example to curves.png")


def run(args: argparse.Namespace) -> int:
    _check(args)

    from sglang_plt.codec import ProfileError
    from sglang_plt.quality import QualityError
    from sglang_plt.quality.arms import NAMES, make_arms, method_of
    from sglang_plt.quality.components import measure_used
    from sglang_plt.quality.curves import rows_of, table
    from sglang_plt.quality.geometry import geometry_rows, geometry_table
    from sglang_plt.quality.model import ReferenceModel
    from sglang_plt.quality.profiles import load_profiles
    from sglang_plt.quality.rate_distortion import measure
    from sglang_plt.quality.speed import measure_speed, rows_of_speed, speed_table
    from sglang_plt.quality.texts import SOURCES, builtin_windows
    from sglang_plt.results import Row, write_rows

    wanted = tuple(dict.fromkeys(args.codec))
    for name in wanted:
        if name not in (*NAMES, "all"):
            raise UserError(f"--codec={name} is not known; choose from {', '.join((*NAMES, 'all'))}")
    names = NAMES if "all" in wanted else wanted
    samples: list[Sample] = []
    timed: list[Row] = []
    shapes = geometry_rows()

    def save() -> None:
        """What is known so far: a run takes hours."""
        _write(args.json, lambda file: write_rows(file, [*rows_of(samples), *timed, *shapes]), "json")

    try:
        path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        model = ReferenceModel(path)
        if max(args.context) + args.continuation > model.max_positions:
            raise UserError(
                f"--context={max(args.context)} and --continuation={args.continuation} need "
                f"{max(args.context) + args.continuation} positions, the model has {model.max_positions}: lower them"
            )
        windows = {
            context: builtin_windows(model.tokenizer, _num_windows(args, context), context + args.continuation)
            for context in dict.fromkeys(args.context)
        }
        given = {}
        if args.profile is not None:
            fitted = dict.fromkeys(method_of(name) for name in PROFILED if name in names)
            given = load_profiles(path, model, fitted, args.profile)
            if not given:
                raise UserError(f"--profile={args.profile} has no profile of this model for {', '.join(names)}")
        _say(f"{path}: float32; text: {SOURCES}")
        with tempfile.TemporaryDirectory() as folder:
            state = args.calibration or Path(folder) / "calibration"
            arms = make_arms(names, model, path, args.tokens, state, given, _say)
        timeable = [arm for arm in arms if arm.name in (*CODECS, *PROFILED)]
        for context, found in windows.items():
            _say(f"context {context}: {len(found)} windows, {len(arms)} arms")
            samples.extend(measure(model, found, context, arms, _reporter(context, found)))
            save()
            if args.repeats and timeable:
                _say(f"context {context}: speed, {args.repeats} rounds")
                rates = measure_speed(model, found, context, timeable, args.repeats)
                timed.extend(rows_of_speed(rates, context))
                save()
        shapes = geometry_rows(used=measure_used(model, windows[min(windows)], min(windows), timeable))
        save()
    except (QualityError, DemoModelError, ProfileError) as error:
        raise UserError(str(error)) from error
    rows = rows_of(samples)
    print(f"prefix through the codec, then {args.continuation} tokens, teacher-forced")
    print(table(rows))
    if timed:
        print(f"\n{speed_table(timed)}")
    print(f"\n{geometry_table(shapes)}")
    if args.plot is not None:
        from sglang_plt.quality.figure import draw

        _write(args.plot, lambda file: draw(rows, file), "plot")
    for file in (args.json, args.plot):
        if file is not None:
            _say(f"wrote {file}")
    return 0


def _num_windows(args: argparse.Namespace, context: int) -> int:
    if args.windows is not None:
        return args.windows
    return _WINDOWS if context <= 2048 else _LONG_WINDOWS


def _reporter(context: int, windows: list[Window]) -> Callable[[int, list[Sample]], None]:
    started = time.monotonic()

    def report(index: int, found: list[Sample]) -> None:
        left = (time.monotonic() - started) / (index + 1) * (len(windows) - index - 1)
        shown = [sample for sample in found if "@" not in sample.arm] or found
        kls = ", ".join(f"{sample.arm} {sample.kl:.2g}" for sample in shown)
        _say(
            f"context {context}: window {index + 1} of {len(windows)} ({windows[index].kind}), {left:.0f} s left; {kls}"
        )

    return report


def _check(args: argparse.Namespace) -> None:
    if args.windows is not None and args.windows < 1:
        raise UserError(f"--windows={args.windows} must be at least 1")
    for context in args.context:
        if context < 5:
            raise UserError(f"--context={context} must be at least 5: the first four tokens stay exact")
    if args.continuation < 2:
        raise UserError(f"--continuation={args.continuation} must be at least 2")
    if args.repeats < 0:
        raise UserError(f"--repeats={args.repeats} must not be negative")
    if args.tokens < 4096:
        raise UserError(f"--tokens={args.tokens} is too few for second moments: give at least 4096")
    for name in ("json", "plot", "calibration"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"--{name}={path}: {path.absolute().parent} is not a directory")
    check_model_path(args)
    if args.profile is not None and not args.profile.exists():
        raise UserError(f"--profile={args.profile} does not exist; make one with sglang-plt calibrate")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install matplotlib")


def _write(path: Path | None, write: Callable[[Path], None], option: str) -> None:
    if path is None:
        return
    try:
        write(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--{option}={path} cannot be written: {reason}") from error


def _say(line: str) -> None:
    print(f"{NAME}: {line}", file=sys.stderr, flush=True)
