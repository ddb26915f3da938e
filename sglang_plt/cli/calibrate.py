"""``sglang-plt calibrate``: makes the profile that the codecs ``dense`` and ``fast`` need, ahead of time."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from sglang_plt.cli.arguments import add_model_path, check_model_path
from sglang_plt.cli.errors import UserError
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model
from sglang_plt.quality import PROFILE_DIVERGENCE

NAME = "calibrate"
HELP = "Fit the profile of a model that the codecs dense and fast need; can be stopped and started again."

_MIN_TOKENS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_path(parser)
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 text to fit on (default: prose, code and chat)"
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        choices=("fast", "dense", "hadamard"),
        default=["fast", "dense"],
        help="what to fit (default: fast and dense)",
    )
    parser.add_argument("--output", metavar="DIR", type=Path, help="for the profiles (default: where servers look)")
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=65536, help="tokens to run the model on (default: 65536)"
    )
    parser.add_argument("--window", metavar="N", type=int, default=1280, help="tokens of one context (default: 1280)")
    parser.add_argument(
        "--kl",
        metavar="NATS",
        type=float,
        default=PROFILE_DIVERGENCE,
        help=f"divergence that the profile aims at (default: {PROFILE_DIVERGENCE})",
    )
    parser.add_argument(
        "--group", metavar="N", type=int, help="layers that share a transform (default: by the model's width)"
    )
    parser.add_argument(
        "--no-predictive-delta", action="store_true", help="predict no layer from the one below, for comparison"
    )
    parser.add_argument("--dtype", help="type of the server's KV pool (default: the model's own)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    from tqdm import tqdm

    from sglang_plt.calibration.identity import default_profile, model_identity, profile_directory
    from sglang_plt.codec import ProfileInfo
    from sglang_plt.codec.profile import default_group, default_token_layers
    from sglang_plt.quality import QualityError
    from sglang_plt.quality.calibrate import CHECK_WINDOWS, SENSITIVITY_WINDOWS, fit_profile
    from sglang_plt.quality.collect import Collection, collect
    from sglang_plt.quality.model import ReferenceModel
    from sglang_plt.quality.texts import SOURCES, builtin_windows, file_windows

    started = time.monotonic()
    try:
        path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        model = ReferenceModel(path)
        if args.window > model.max_positions:
            raise UserError(f"--window={args.window} exceeds the {model.max_positions} positions of the model")
        count = -(-args.tokens // args.window)
        if args.text is None:
            windows = builtin_windows(model.tokenizer, count + CHECK_WINDOWS, args.window, "calibration")
        else:
            windows = file_windows(model.tokenizer, args.text, count + CHECK_WINDOWS, args.window)
        identity = model_identity(path)
    except (QualityError, DemoModelError, OSError, ValueError) as error:
        raise UserError(str(error)) from error
    layout, rotary = model.layout, model.rotary(args.window)
    dtype = args.dtype or model.dtype
    groups = {codec: args.group or default_group(layout, codec) for codec in dict.fromkeys(args.codec)}
    group = max(groups.values())  # moments of so many layers hold those of fewer
    if any(group % other for other in groups.values()):
        raise UserError(f"--group={args.group} does not go with {groups}")
    output = args.output or profile_directory()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output={output} is not a directory that can be made: {error.strerror}") from error
    state = output / f".{identity}-{dtype}.partial"
    hidden = 0 if args.no_predictive_delta else model.embedding.hidden
    token_layers = max(default_token_layers(layout, codec, groups[codec]) for codec in groups)
    collection = Collection(
        layout,
        group,
        f"{identity} {args.text or SOURCES} {args.tokens} {args.window} {group} {hidden} {token_layers}",
        hidden,
        token_layers,
    )
    if collection.resume(state):
        _say(f"going on after {collection.done} of {count} windows")
    _say(f"{path}: {identity}, {dtype}, text: {args.text or SOURCES}")
    try:
        with tqdm(total=count * args.window, initial=collection.done * args.window, unit="token", desc=NAME) as bar:
            collect(
                model, windows[:count], SENSITIVITY_WINDOWS, collection, state, lambda done: bar.update(args.window)
            )
    except OSError as error:
        raise UserError(f"{state} cannot be written: {error.strerror}") from error
    for codec, layers in groups.items():
        info = ProfileInfo.open(
            codec,
            identity,
            layout,
            dtype=dtype,
            group=layers,
            keys_rotated=rotary is None,
            predicts=not args.no_predictive_delta,
            hidden=hidden,
            tokens=collection.moments.count,
            sensitivity="fisher",
        )
        fitting = time.monotonic()
        profile = fit_profile(info, collection, args.kl, model, windows[count:], _say)
        file = output / default_profile(identity, dtype, info.kind).name
        try:
            profile.save(file)
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}") from error
        print(
            f"wrote {file}: {profile.num_bytes} bytes, {layers} layers a transform, {info.tokens} tokens, "
            f"fitted and measured in {time.monotonic() - fitting:.1f} s"
        )
    state.unlink(missing_ok=True)
    _say(f"{time.monotonic() - started:.0f} s in all")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.tokens < _MIN_TOKENS:
        raise UserError(f"--tokens={args.tokens} is too few for second moments: give at least {_MIN_TOKENS}")
    if args.window < 512:
        raise UserError(f"--window={args.window} must be at least 512: half of it may be a continuation")
    if not 0 < args.kl <= 1:
        raise UserError(f"--kl={args.kl} must be above 0 and at most 1 nat")
    if args.group is not None and args.group < 1:
        raise UserError(f"--group={args.group} must be at least 1")
    check_model_path(args)


def _say(line: str) -> None:
    print(f"{NAME}: {line}", file=sys.stderr, flush=True)
