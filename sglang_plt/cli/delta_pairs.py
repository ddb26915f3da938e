"""``sglang-plt delta-pairs``: near-identical prompts coded as differences, one from the other."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from sglang_plt.cli.arguments import add_model_path, check_model_path
from sglang_plt.cli.errors import UserError, no_profile
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model

NAME = "delta-pairs"
HELP = "Measure what a prompt takes as differences from one that it nearly equals, and how far answers move."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_path(parser)
    parser.add_argument(
        "--codec", nargs="+", choices=("dense", "fast"), default=["dense", "fast"], help="codecs (default: both)"
    )
    parser.add_argument(
        "--profile", metavar="PATH", type=Path, help="profile, or directory of profiles (default: where servers look)"
    )
    parser.add_argument("--pairs", metavar="NAME", nargs="+", default=["all"], help="pairs of prompts (default: all)")
    parser.add_argument(
        "--reference-step",
        metavar="X",
        type=float,
        default=1.0,
        help="step of the first prompt's quantiser, in steps of the profile (default: 1)",
    )
    parser.add_argument(
        "--step", metavar="X", type=float, default=1.0, help="step of the second prompt's quantiser (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")


def run(args: argparse.Namespace) -> int:
    for name in ("reference_step", "step"):
        value = getattr(args, name)
        if not (math.isfinite(value) and 0.01 <= value <= 100):
            raise UserError(f"--{name.replace('_', '-')}={value} must be from 0.01 to 100 steps of the profile")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    check_model_path(args)
    if args.profile is not None and not args.profile.exists():
        raise UserError(f"--profile={args.profile} does not exist; make one with sglang-plt calibrate")

    from sglang_plt.quality import QualityError
    from sglang_plt.quality.delta_pairs import MIN_RUN, Sample, measure, rows_of, table
    from sglang_plt.quality.model import ReferenceModel
    from sglang_plt.quality.pairs import CONTINUATION, NAMES, PROMPT, near_pairs
    from sglang_plt.quality.profiles import load_profiles
    from sglang_plt.quality.texts import SOURCES
    from sglang_plt.quality.unrelated import measure_unrelated
    from sglang_plt.results import write_rows

    for name in args.pairs:
        if name not in (*NAMES, "all"):
            raise UserError(f"--pairs={name} is not known; choose from {', '.join((*NAMES, 'all'))}")
    codecs = tuple(dict.fromkeys(args.codec))
    try:
        path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        model = ReferenceModel(path)
        if model.max_positions < PROMPT + CONTINUATION:
            raise UserError(f"pairs need {PROMPT + CONTINUATION} positions, the model has {model.max_positions}")
        profiles = load_profiles(path, model, codecs, args.profile)
        for codec in codecs:
            if codec not in profiles:
                raise no_profile(codec)
        pairs = near_pairs(model.tokenizer, NAMES if "all" in args.pairs else args.pairs)
        _say(f"{path}: float32; text: {SOURCES}")

        def on_sample(sample: Sample) -> None:
            _say(f"{sample.pair}, {sample.codec}: {sample.bits:.4f} bits a value, {sample.bits_alone:.3f} alone")

        samples = measure(model, pairs, profiles, args.reference_step, args.step, on_sample)
        unrelated = measure_unrelated(model, profiles) if "all" in args.pairs else []
    except (QualityError, DemoModelError, ValueError) as error:
        raise UserError(str(error)) from error
    print(
        f"prompts of {PROMPT} tokens, the second from its first difference on as differences from the first (runs of "
        f"{MIN_RUN} tokens and more; rows without such a counterpart stand apart), then {CONTINUATION} tokens, "
        f"teacher-forced; steps of the profile: {args.reference_step:g} for the first, {args.step:g} for the second"
    )
    print(table(sorted(samples, key=lambda sample: codecs.index(sample.codec))))
    for row in unrelated:
        interval = f" [{row.lo:.3f}, {row.hi:.3f}]" if row.lo is not None else ""
        print(f"{row.arm}: {row.metric} {row.value:.4f}{interval}")
    if args.json is not None:
        try:
            write_rows(args.json, [*rows_of(samples), *unrelated])
        except OSError as error:
            raise UserError(f"--json={args.json} cannot be written: {error.strerror}") from error
        _say(f"wrote {args.json}")
    return 0


def _say(line: str) -> None:
    print(f"{NAME}: {line}", file=sys.stderr, flush=True)
