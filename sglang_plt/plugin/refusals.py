"""What we do not serve is refused at start, with the flag, its value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_plt.config import ConfigError, PLTConfig
from sglang_plt.plugin.seams import seam_error
from sglang_plt.policy import EVICTION_POLICIES, make_order

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class Refusal:
    """One flag of SGLang that excludes this cache.

    Attributes:
        field: field of the resolved server arguments.
        refused: whether a value of it excludes us.
        reason: why, and what to do instead.
        cold_only: only with a cold tier.
    """

    field: str
    refused: Callable[[Any], bool]
    reason: str
    cold_only: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


REFUSALS = (
    Refusal("disable_radix_cache", bool, "there is no cache to replace; drop one of the two flags"),
    Refusal("enable_hierarchical_cache", bool, "both would own the host tier; use one of them"),
    Refusal("enable_lmcache", bool, "both would own the host tier; use one of them"),
    Refusal("enable_flexkv", bool, "both would own the host tier; use one of them"),
    Refusal("enable_unified_cache_external_linker", bool, "it needs SGLang's unified tree; use one of them"),
    Refusal("enable_streaming_session", bool, "streaming sessions live in SGLang's unified tree; drop one of the two"),
    Refusal(
        "enable_session_radix_cache", bool, "session references live in SGLang's unified tree; drop one of the two"
    ),
    Refusal("enable_kv_cache_sharding", bool, "a rank would hold a stripe of each page; drop one of the two"),
    Refusal("enable_unified_memory", bool, "its pools have no fixed slots; drop one of the two"),
    Refusal("enable_page_major_kv_layout", bool, "the cold tier reads one buffer a layer; drop one of the two", True),
    Refusal("pp_size", _above_one, "pipeline stages are not served yet; use tensor parallelism"),
    Refusal("dcp_size", _above_one, "context parallelism shards KV rows; set it to 1"),
    Refusal("attn_cp_size", _above_one, "context parallelism shards KV rows; set it to 1"),
    Refusal(
        "disaggregation_mode", lambda v: v not in (None, "null"), "disaggregation is not served yet; set it to null"
    ),
    Refusal("dllm_algorithm", lambda v: v is not None, "diffusion models re-write cached rows; drop one of the two"),
    Refusal(
        "speculative_algorithm",
        lambda v: v is not None,
        "draft rows share the slots of target rows and are not restored; drop one of the two, or switch the cold tier "
        "off with --plt-cold-bytes 0",
        True,
    ),
    Refusal(
        "radix_eviction_policy",
        lambda v: str(v).lower() not in EVICTION_POLICIES,
        f"choose one of {', '.join(EVICTION_POLICIES)}, or --plt-policy",
    ),
)


def check_flags(record: ServerArgs, config: PLTConfig) -> None:
    """Refuse flags that exclude this cache.

    Raises:
        ConfigError: the first such flag, with its value and the remedy.
        SeamError: SGLang has no such field any more.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(record)
    for refusal in REFUSALS:
        try:
            value = getattr(view, refusal.field)
        except AttributeError:
            raise seam_error(f"ServerArgs.{refusal.field} ({refusal.flag}) is missing") from None
        if refusal.cold_only and not config.has_cold_tier:
            continue
        if refusal.refused(value):
            raise ConfigError(f"--radix-cache plt cannot be combined with {refusal.flag}={value!r}: {refusal.reason}")
    policy_options = record.radix_eviction_policy_config
    try:
        make_order(config.policy, policy_options)
    except ValueError:
        raise ConfigError(
            f"--radix-eviction-policy-config={policy_options!r} does not fit the policy {config.policy}; drop it, or "
            "use --plt-policy slru, which takes protected_threshold, a whole number"
        ) from None


def check_model(context: TreeCacheBuildContext) -> None:
    """Refuse models whose state is more than one KV row a token.

    Raises:
        ConfigError: names what the model has.
    """
    what = None
    if context.is_hybrid_swa:
        what = "sliding-window attention"
    elif context.is_hybrid_ssm:
        what = "Mamba or linear-attention state"
    elif context.is_dsa:
        what = "a sparse-attention index"
    if what is not None:
        raise ConfigError(
            f"--radix-cache plt does not serve models with {what}; start this model without --radix-cache plt"
        )
