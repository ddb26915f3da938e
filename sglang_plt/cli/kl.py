"""``sglang-plt kl``: what each codec does to a model's answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_plt.cli.arguments import add_model_path, check_model_path
from sglang_plt.cli.errors import UserError, no_profile
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model

NAME = "kl"
HELP = "Measure how far a model's next-token distributions move when its prefix KV was evicted and restored."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_path(parser)
    parser.add_argument(
        "--codec",
        nargs="+",
        choices=(*CODECS, *PROFILED, "all"),
        default=["all"],
        help="codecs to measure (default: all that need no profile, or have one)",
    )
    parser.add_argument(
        "--profile", metavar="PATH", type=Path, help="profile, or directory of profiles (default: where servers look)"
    )
    parser.add_argument(
        "--turns", metavar="N", type=int, default=1, help="turns in which the prefix grows, each restored (default: 1)"
    )
    parser.add_argument("--context", metavar="N", type=int, default=1024, help="tokens of the prefix (default: 1024)")
    parser.add_argument(
        "--continuation", metavar="N", type=int, default=256, help="tokens behind it that are compared (default: 256)"
    )
    parser.add_argument("--windows", metavar="N", type=int, default=6, help="places in the text (default: 6)")
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 text to measure on (default: documentation, code and chat)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")


def run(args: argparse.Namespace) -> int:
    for name in ("context", "continuation", "windows", "turns"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)} must be at least 1")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    check_model_path(args)
    if args.profile is not None and not args.profile.exists():
        raise UserError(f"--profile={args.profile} does not exist; make one with sglang-plt calibrate")

    from sglang_plt.quality import QualityError
    from sglang_plt.quality.kl import Sample, measure, rows_of, table
    from sglang_plt.quality.model import ReferenceModel
    from sglang_plt.quality.profiles import load_profiles
    from sglang_plt.quality.texts import SOURCES, builtin_windows, file_windows
    from sglang_plt.results import write_rows

    length = args.context + args.continuation
    try:
        path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        model = ReferenceModel(path)
        if length > model.max_positions:
            raise UserError(
                f"--context={args.context} and --continuation={args.continuation} need {length} positions, the model "
                f"has {model.max_positions}: lower them"
            )
        if args.text is None:
            windows = builtin_windows(model.tokenizer, args.windows, length)
        else:
            windows = file_windows(model.tokenizer, args.text, args.windows, length)
        wanted = PROFILED if "all" in args.codec else tuple(name for name in PROFILED if name in args.codec)
        profiles = load_profiles(path, model, wanted, args.profile)
        missing = [name for name in wanted if name not in profiles]
        if missing and "all" not in args.codec:
            raise no_profile(missing[0])
        codecs = (*CODECS, *profiles) if "all" in args.codec else tuple(dict.fromkeys(args.codec))
        keys = "without RoPE" if model.rotary(args.context) is not None else "rotated (its rotary is not understood)"
        _say(f"{path}: float32, keys stored {keys}")
        _say(f"text: {args.text or SOURCES}")

        def on_window(index: int, found: list[Sample]) -> None:
            kls = ", ".join(f"{sample.codec} {sample.kl:.2g}" for sample in found)
            _say(f"window {index + 1} of {len(windows)} ({windows[index].kind}): KL {kls}")

        rows = rows_of(measure(model, windows, args.context, codecs, on_window, profiles, args.turns))
    except (QualityError, DemoModelError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f"prefix of {args.context} tokens through the codec, then {args.continuation} tokens, teacher-forced")
    print(table(rows))
    if args.json is not None:
        try:
            write_rows(args.json, rows)
        except OSError as error:
            raise UserError(f"--json={args.json} cannot be written: {error.strerror}") from error
        _say(f"wrote {args.json}")
    return 0


def _say(line: str) -> None:
    print(f"kl: {line}", file=sys.stderr, flush=True)
