"""``--radix-cache`` and ``--plt-*`` as real flags of SGLang's command line, and as keywords of ``sgl.Engine``.

Option values ride on the server-arguments record as one plain attribute, which survives pickling to the scheduler
process. They become a :class:`PLTConfig` in the launcher, so that a wrong value is refused before anything is loaded:
with one line and no traceback where the options come from a command line, with an exception elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_plt.config import CODECS, POLICIES, PROFILED, ConfigError, PLTConfig
from sglang_plt.plugin.hooks import check_in_place
from sglang_plt.plugin.refusals import check_flags
from sglang_plt.plugin.seams import SeamError, check_seams

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ATTRIBUTE = "_plt_options"
COMMAND_LINE = "_plt_command_line"
PLAIN_POLICY = "lru"  # SGLang's default
EXPLICIT = "_radix_eviction_policy_explicitly_set"
PREFIX = "plt_"

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang.srt.entrypoints.engine"
HOOKS = (f"{_SERVER_ARGS}.add_cli_args", f"{_SERVER_ARGS}.from_cli_args", f"{_SERVER_ARGS}.check_server_args")


def install() -> None:
    """Register the hooks that add, carry and check our options."""
    HookRegistry.register(HOOKS[0], _after_add_cli_args, HookType.AFTER)
    HookRegistry.register(HOOKS[1], _after_from_cli_args, HookType.AFTER)
    HookRegistry.register(HOOKS[2], _before_check_server_args, HookType.BEFORE)
    hook_engine()


def hook_engine() -> None:
    """Let ``sgl.Engine`` take ``plt_*`` keywords; does nothing before the engine is imported, or when done already.

    ``sgl.Engine`` loads the plug-ins itself, so only a program that loads them before it imports the engine has to call
    this again.
    """
    engine = sys.modules.get(_ENGINE)
    if engine is not None and not isinstance(engine.Engine.server_args_class, _EngineRecordBuilder):
        # the record is a C struct whose construction no hook on __init__ sees, so Engine is handed a builder instead
        engine.Engine.server_args_class = _EngineRecordBuilder(engine.Engine.server_args_class)


def _after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    default = PLTConfig()
    group = parser.add_argument_group("sglang-plt", "Options of --radix-cache plt.")
    group.add_argument(
        "--radix-cache",
        dest="radix_cache_backend",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="Prefix cache to use; the same as --radix-cache-backend. 'plt' selects sglang-plt.",
    )

    def add(name: str, type: Any, metavar: str, help: str) -> None:
        group.add_argument(f"--plt-{name}", type=type, metavar=metavar, default=argparse.SUPPRESS, help=help)

    add("config", str, "FILE", "JSON file with these options, without the prefix; flags override it.")
    add(
        "codec", str, "CODEC", f"How evicted KV is stored: {', '.join((*CODECS, *PROFILED))} (default {default.codec})."
    )
    add("profile", str, "PATH", "Profile, or directory of profiles (default: where sglang-plt calibrate puts them).")
    add(
        "predictive-delta",
        _switch,
        "on|off",
        "Whether fast and dense predict a layer from the one below (default on); off is for comparison.",
    )
    add(
        "delta",
        _switch,
        "on|off",
        "Whether fast and dense store blocks that resemble others as differences from them (default on).",
    )
    add("cold-bytes", str, "SIZE", "Budget of the cold tier on each rank, for example 4GiB; 0 switches it off.")
    add(
        "cold-fraction",
        float,
        "F",
        f"The same budget as a multiple of the bytes of the KV pool (default {default.cold_fraction}).",
    )
    add(
        "policy",
        str,
        "POLICY",
        f"What goes first, in every tier: {', '.join(POLICIES)} (default {default.policy}). Must not contradict "
        "--radix-eviction-policy, which decides where only that one is given.",
    )
    add(
        "restore-threshold",
        int,
        "TOKENS",
        f"Recompute shorter runs of evicted tokens instead of restoring them (default {default.restore_threshold}).",
    )
    add(
        "write-ahead",
        int,
        "TOKENS",
        "Encode this many tokens before eviction needs their slots, once 7/8 of the pool are in use (default "
        f"{default.write_ahead}).",
    )
    add(
        "replay-tokens",
        int,
        "TOKENS",
        "Keep the keys of this many dropped tokens for their statistics, at 8 bytes each and about 1 KB a node, on "
        f"each rank (default {default.replay_tokens}).",
    )
    add(
        "delta-threshold",
        float,
        "BITS",
        f"Sequences that share this much information are a cluster of their own (default {default.delta_threshold}).",
    )
    add(
        "near-miss",
        str,
        "off|report|on",
        "Reuse rows of a prompt that is nearly the same and compute what differs (on), or only say how far such rows "
        f"would have been off (report); default {default.near_miss}.",
    )
    add("near-miss-override", _switch, "on|off", "Whether a request may ask for more than that (default off).")
    add(
        "near-miss-recompute",
        int,
        "TOKENS",
        f"Compute this many tokens behind every difference as well (default {default.near_miss_recompute}).",
    )
    add(
        "near-miss-max-difference",
        float,
        "SHARE",
        "Largest share of differing tokens up to the end of what is reused (default "
        f"{default.near_miss_max_difference}).",
    )
    add(
        "layerwise-restore",
        _switch,
        "on|off",
        "Restore while the forward pass runs; never tried on a GPU (default off).",
    )
    add(
        "triton",
        _switch,
        "on|off",
        "Encode (int8, int4) and decode rows by Triton kernels; never tried on a GPU (default off).",
    )
    add("decision-log", str, "FILE", "Write every decision as a JSON line to FILE.tp<rank>.")


def _switch(text: str) -> bool | str:
    """``on`` or ``off``; whatever else is left to the configuration to refuse."""
    switches: dict[str, bool | str] = {"on": True, "off": False}
    return switches.get(text.lower(), text)


def _after_from_cli_args(record: ServerArgs, cls: type[ServerArgs], args: argparse.Namespace) -> None:
    set_options(record, {k[len(PREFIX) :]: v for k, v in vars(args).items() if k.startswith(PREFIX)})
    setattr(record, COMMAND_LINE, True)
    with _one_line(record):
        config_of(record)


@contextmanager
def _one_line(record: ServerArgs) -> Iterator[None]:
    """A refusal ends a command with its message as the last line, as argparse's own do, and is raised elsewhere."""
    try:
        yield
    except (ConfigError, SeamError) as error:
        if getattr(record, COMMAND_LINE, False):
            raise SystemExit(f"sglang-plt: error: {error}") from error
        raise


class _EngineRecordBuilder:
    """Stands in for ``Engine.server_args_class``: takes the ``plt_*`` keywords out before the record is built."""

    def __init__(self, original: Any):
        self._original = original

    def __call__(self, **kwargs: Any) -> ServerArgs:
        options = {k[len(PREFIX) :]: kwargs.pop(k) for k in list(kwargs) if k.startswith(PREFIX)}
        if "radix_eviction_policy" in kwargs and kwargs.get("radix_cache_backend") == "plt":
            kwargs.setdefault(EXPLICIT, True)  # as SGLang notes for its command line
        record = self._original(**kwargs)
        set_options(record, options)
        config_of(record)
        return record


def set_options(record: ServerArgs, options: dict[str, Any]) -> None:
    """Attach option values to a record."""
    setattr(record, ATTRIBUTE, options)


def options_of(record: ServerArgs) -> dict[str, Any]:
    """The option values of a record; empty where none were given."""
    return getattr(record, ATTRIBUTE, {})


def config_of(record: ServerArgs) -> PLTConfig | None:
    """The configuration that a record asks for, None where it does not select this cache.

    ``--plt-policy`` names the policy. Where it is not given and ``--radix-eviction-policy`` is, that one does; the
    default of SGLang's flag says nothing.

    Raises:
        ConfigError: a wrong option, two policies, or options without ``--radix-cache plt``.
    """
    given = options_of(record)
    if record.radix_cache_backend != "plt":
        if given:
            flags = ", ".join(f"--plt-{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{flags} given without --radix-cache plt; add it, or drop the options")
        return None
    theirs = record.radix_eviction_policy.lower()
    if theirs not in POLICIES or (theirs == PLAIN_POLICY and not getattr(record, EXPLICIT, False)):
        return PLTConfig.from_options(given)  # what we do not have is refused with the other flags
    config = PLTConfig.from_options(given, policy=theirs)
    if config.policy != theirs:
        raise ConfigError(
            f"--plt-policy={config.policy} and --radix-eviction-policy={theirs} contradict each other; drop one of them"
        )
    return config


def _before_check_server_args(record: ServerArgs) -> None:
    with _one_line(record):
        config = config_of(record)
        if config is not None:
            check_seams()
            check_hooks()
            check_flags(record, config)


def check_hooks() -> None:
    """A hook that fails to apply is only logged by SGLang; without ours the options would be silently ignored.

    Raises:
        SeamError: names the hooks that are not in place.
    """
    check_in_place(HOOKS)
