"""Where near-miss reuse meets the scheduler: chunks that end before a span, and rows that follow a chunk.

All hooks are put in place with a cache that has the feature, in the scheduler's process only; without it nothing of
SGLang is touched.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.plugins.hook_registry import HookType

from sglang_plt.cache.grafts import Grafts
from sglang_plt.cache.near_request import state_of
from sglang_plt.near_miss import Refusal
from sglang_plt.plugin.hooks import put_in_place

HOOKS = (
    "sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
    "sglang.srt.mem_cache.common.checkpoint_kv_cache",
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
)


def install() -> None:
    """Put the hooks in place; does nothing when they are.

    Raises:
        SeamError: SGLang could not apply them.
    """
    put_in_place(
        {
            HOOKS[0]: (_adder_class, HookType.AFTER),
            HOOKS[1]: (_after_checkpoint, HookType.AFTER),
            HOOKS[2]: (_after_details, HookType.AFTER),
        }
    )


def _grafts(tree_cache: Any) -> Grafts | None:
    return getattr(tree_cache, "grafts", None)


def _adder_class(adder: type[PrefillAdder], *args: Any, **kwargs: Any) -> type[PrefillAdder]:
    return NearMissAdder if adder is PrefillAdder else adder


def _after_checkpoint(result: Any, req: Any, tree_cache: Any) -> None:
    grafts = _grafts(tree_cache)
    if grafts is not None:
        grafts.graft(req)


def _after_details(details: dict[str, Any] | None, streamer: Any, req: Any) -> dict[str, Any] | None:
    state = state_of(req)
    grafted = state.grafted if state is not None else 0
    return {"device": 0, "host": 0, **(details or {}), "near_miss": grafted} if grafted else details


class NearMissAdder(PrefillAdder):
    """Lets the prefill of a request stop where a span of a donor's rows follows."""

    rem_chunk_tokens: int | None
    chunked_req_limit: int | None

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        grafts = _grafts(self.tree_cache)
        matched = req.prefix_len + req.host_hit_length
        stop = grafts.first_stop(req, matched) if grafts is not None else None
        if grafts is None or stop is None:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        limit, before = stop - matched, self.rem_chunk_tokens
        if truncation_align_size is not None or self.dllm_config is not None:
            grafts.give_up(req, Refusal.REQUEST)
        elif has_chunked_req or self.new_chunked_req is not None:
            if grafts.waits(req):
                return AddReqResult.OTHER
        elif before is None or limit < before:
            self.rem_chunk_tokens = limit
            result = super().add_one_req(req, has_chunked_req, truncation_align_size)
            used = limit - self.rem_chunk_tokens
            self.rem_chunk_tokens = None if before is None else before - used
            added = bool(self.can_run_list) and self.can_run_list[-1] is req
            return self.budget_state() if added else result
        return super().add_one_req(req, has_chunked_req, truncation_align_size)

    def add_chunked_req(self, req: Any) -> Any:
        grafts = _grafts(self.tree_cache)
        stop = grafts.next_stop(req, req.prefix_len) if grafts is not None else None
        if stop is not None:
            limit = stop - req.prefix_len
            self.chunked_req_limit = limit if self.chunked_req_limit is None else min(limit, self.chunked_req_limit)
        return super().add_chunked_req(req)
