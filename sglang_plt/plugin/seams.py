"""Every symbol of SGLang that we rely on, one row each, checked before a server starts on this cache."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass

SGLANG_VERSION = "0.5.23"

_MEM = "sglang.srt.mem_cache"


@dataclass(frozen=True)
class Seam:
    """A dotted path, and parameters or members that must be found on it."""

    path: str
    parameters: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


class SeamError(RuntimeError):
    """The installed SGLang is not the one that this version of sglang-plt was written for."""


SEAMS = (
    Seam(f"{_MEM}.registry.register_radix_cache_backend", parameters=("name", "factory")),
    Seam(
        f"{_MEM}.registry.TreeCacheBuildContext",
        parameters=(
            "server_args",
            "params",
            "is_hybrid_swa",
            "is_hybrid_ssm",
            "is_dsa",
            "tp_worker",
            "model_config",
            "tp_size",
            "tp_rank",
        ),
    ),
    Seam(
        f"{_MEM}.base_prefix_cache.BasePrefixCache",
        members=(
            "reset",
            "match_prefix",
            "checkpoint",
            "evict",
            "inc_lock_ref",
            "dec_lock_ref",
            "lock",
            "unlock",
            "path_device_indices",
            "prefix_device_indices",
            "init_load_back",
            "load_back_is_cache_owned",
            "on_release",
            "touch_prefix",
            "release_host_resources",
            "init_metrics_collector",
            "update_eviction_metrics",
        ),
    ),
    Seam(
        f"{_MEM}.base_prefix_cache.MatchResult",
        parameters=(
            "device_prefix_len",
            "last_device_node",
            "last_host_node",
            "best_match_node",
            "host_hit_length",
            "full_kv_hit_length",
        ),
    ),
    Seam(f"{_MEM}.base_prefix_cache.MatchPrefixParams", parameters=("key", "req")),
    Seam(f"{_MEM}.base_prefix_cache.EvictParams", parameters=("num_tokens",)),
    Seam(f"{_MEM}.base_prefix_cache.EvictResult", parameters=("num_tokens_evicted",)),
    Seam(f"{_MEM}.base_prefix_cache.IncLockRefResult", parameters=("delta",)),
    Seam(f"{_MEM}.base_prefix_cache.DecLockRefParams"),
    Seam(f"{_MEM}.base_prefix_cache.DecLockRefResult", parameters=("delta",)),
    Seam(f"{_MEM}.base_prefix_cache.InsertResult", parameters=("prefix_len", "last_device_node")),
    Seam(f"{_MEM}.base_prefix_cache.InitLoadBackParams", parameters=("best_match_node", "host_hit_length", "req")),
    Seam(f"{_MEM}.base_prefix_cache.InsertParams", parameters=("key", "value", "inserted_len", "priority")),
    Seam(
        f"{_MEM}.radix_cache.RadixKey",
        parameters=("token_ids", "extra_key", "is_bigram", "limit", "cache_salt"),
    ),
    Seam(
        f"{_MEM}.events.KVCacheEventRecorder",
        parameters=("enabled", "page_size", "dynamo_format", "lora_names"),
        members=("record_store", "record_remove", "record_all_cleared", "take"),
    ),
    Seam(f"{_MEM}.utils.split_node_hash_value", parameters=("child_hash_value", "split_len", "page_size")),
    Seam(
        f"{_MEM}.cache_init_params.CacheInitParams",
        parameters=(
            "disable",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "page_size",
            "is_eagle",
            "tp_cache_group",
            "eviction_policy_config",
            "enable_metrics",
            "enable_kv_cache_events",
            "dynamo_kv_event_format",
            "kv_event_lora_names",
        ),
    ),
    Seam(
        f"{_MEM}.allocator.base.BaseTokenToKVPoolAllocator",
        members=("available_size", "alloc", "free_segment", "get_kvcache"),
    ),
    Seam(f"{_MEM}.memory_pool.MHATokenToKVPool", members=("get_key_buffer", "get_value_buffer")),
    Seam(f"{_MEM}.memory_pool.MLATokenToKVPool", members=("get_key_buffer",)),
    Seam(
        "sglang.srt.managers.schedule_batch.ReqKvInfo",
        parameters=("req_pool_idx", "cache_protected_len", "cache_inserted_len"),
    ),
    Seam("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", parameters=("req",)),
    Seam(
        "sglang.srt.server_args.ServerArgs",
        members=(
            "add_cli_args",
            "from_cli_args",
            "check_server_args",
            "radix_eviction_policy",
            "radix_eviction_policy_config",
            "_radix_eviction_policy_explicitly_set",
        ),
    ),
    Seam("sglang.srt.arg_groups.overrides.resolving_view", parameters=("server_args",)),
    Seam("sglang.srt.plugins.hook_registry.HookRegistry", members=("register", "apply_hooks", "_patched")),
    Seam("sglang.srt.plugins.hook_registry.HookType", members=("BEFORE", "AFTER", "AROUND")),
    Seam(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController",
        parameters=("scheduler",),
        members=("set_internal_state", "get_internal_state"),
    ),
    Seam("sglang.srt.managers.io_struct.SetInternalStateReq", parameters=("server_args",)),
    Seam("sglang.srt.managers.io_struct.SetInternalStateReqOutput", parameters=("updated",)),
    Seam("sglang.srt.managers.io_struct.GetInternalStateReqOutput", parameters=("internal_state",)),
    Seam(
        "sglang.srt.managers.schedule_batch.ReqLogprob",
        parameters=("output_token_logprobs_val",),
    ),
    Seam("sglang.version.__version__"),
    Seam(
        "sglang.srt.managers.schedule_policy.PrefillAdder",
        members=("add_one_req", "add_chunked_req", "budget_state"),
    ),
    Seam("sglang.srt.managers.schedule_policy.AddReqResult", members=("CONTINUE", "OTHER")),
    Seam("sglang.srt.managers.scheduler.Scheduler", members=("get_prefill_adder_class",)),
    Seam(f"{_MEM}.common.checkpoint_kv_cache", parameters=("req", "tree_cache")),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
        members=("get_cached_tokens_details",),
    ),
)


def check_seams(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Compare the installed SGLang with the table.

    Raises:
        SeamError: names every symbol that is missing or has changed, the installed version and the remedy.
    """
    problems = [problem for seam in seams for problem in _problems(seam)]
    if problems:
        raise seam_error("; ".join(problems))


def seam_error(problems: str) -> SeamError:
    """The error for ``problems``, completed by the installed version and the remedy."""
    from sglang.version import __version__

    remedy = f"install sglang=={SGLANG_VERSION}"
    if __version__ != SGLANG_VERSION:
        remedy += f", or a release of sglang-plt made for {__version__}"
    return SeamError(
        f"sglang-plt is made for SGLang {SGLANG_VERSION}, and the installed {__version__} differs: {problems}; "
        f"{remedy}, or start the server without --radix-cache plt"
    )


def _problems(seam: Seam) -> list[str]:
    try:
        symbol = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return [f"{seam.path} is missing ({error})"]
    problems = [f"{seam.path}.{name} is missing" for name in seam.members if not hasattr(symbol, name)]
    if seam.parameters:
        try:
            accepted = inspect.signature(symbol).parameters
        except (TypeError, ValueError):
            return [*problems, f"{seam.path} has no signature"]
        problems += [f"{seam.path} takes no {name!r}" for name in seam.parameters if name not in accepted]
    return problems
