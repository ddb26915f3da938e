"""Near-miss reuse in a running cache: plans a request's spans, fills them from a donor, keeps them apart from the rest.

A request that was given rows of a donor owns them, and all that it computes behind them, until it ends: nothing of it
enters the trie meanwhile but the exact rows before its first span. What it leaves goes into a namespace of its own (see
:func:`sglang_plt.keys.near_miss_namespace`), where requests that accept reused rows find it; it is no donor, no
reference of other blocks, and goes when the same tokens are computed.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from sglang_plt.cache.near_stats import NearMissStats
from sglang_plt.keys import Key, Namespace, is_near_miss, make_namespace, near_miss_namespace
from sglang_plt.near_miss import Donors, Limits, Refusal, Span, plan_spans
from sglang_plt.node import Node

if TYPE_CHECKING:
    from sglang_plt.cache.prefix_cache import PLTRadixCache

logger = logging.getLogger(__name__)

OFF, REPORT, ON = "off", "report", "on"
MODES = (OFF, REPORT, ON)
STATE = "plt_near_miss"
_PASSES = 8  # that a request waits for another one's chunks
_SCALE = 0.02


class Mover(Protocol):
    """Copies rows between slots; see :class:`sglang_plt.host.mover.RowMover`."""

    def can_shift(self, position: int, num_rows: int, shift: int) -> bool: ...

    def copy(self, source: Any, target: Any, position: int, shift: int) -> None: ...

    def deviation(self, one: Any, other: Any) -> float: ...


@dataclass
class NearRequest:
    """What a request carries while it runs."""

    mode: str = OFF
    planned_at: int = -1
    spans: list[Span] = field(default_factory=list)
    donor: int = 0
    tokens: np.ndarray | None = None  # of the donor
    waits: int = 0
    prefix: bool = False  # it was given a prefix with reused rows
    owned_from: int = -1  # from here on rows are the request's own until it ends
    grafted: int = 0


class Grafts:
    """Of one cache.

    Args:
        mode: for requests that do not ask; a request may ask for less, and for more with ``override``.
    """

    def __init__(self, cache: PLTRadixCache, mover: Mover, mode: str, override: bool, limits: Limits):
        self._cache = cache
        self._mover = mover
        self._mode = mode
        self._override = override
        self._limits = limits
        self._donors = Donors()
        self.stats = NearMissStats()

    def clear(self) -> None:
        """Forget all donors."""
        self._donors.clear()

    # -- before a request runs ------------------------------------------------------------------------------------

    def mode_of(self, req: Any) -> str:
        """What a request gets."""
        params = getattr(getattr(req, "sampling_params", None), "custom_params", None)
        asked = params.get(STATE) if isinstance(params, dict) else None
        if asked not in MODES:
            return self._mode
        return asked if self._override or MODES.index(asked) < MODES.index(self._mode) else self._mode

    def match(self, req: Any, key: Key, exact: int) -> tuple[Node, Node] | None:
        """What :meth:`sglang_plt.trie.Trie.match` finds among reused rows, where that is more and ``req`` accepts it.

        Args:
            exact: tokens that are there without reuse.
        """
        state: NearRequest | None = getattr(req, STATE, None)
        if state is None:
            state = NearRequest()
            setattr(req, STATE, state)
        state.mode, state.prefix = self.mode_of(req), False
        if state.mode != ON or not self.stats.published:
            return None
        near = Key(key.tokens, near_miss_namespace(key.namespace), key.bigram, key.length)
        hot, last = self._cache.trie.match(near)
        if last.stop < exact + self._limits.min_span:
            return None
        state.prefix, state.grafted = True, last.stop - exact
        return hot, last

    def namespace_of(self, req: Any) -> Namespace | None:
        """Where the rows of a request belong."""
        namespace = make_namespace(req.extra_key, req.cache_salt)
        state = getattr(req, STATE, None)
        return near_miss_namespace(namespace) if state is not None and state.prefix else namespace

    def first_stop(self, req: Any, matched: int) -> int | None:
        """Where the first chunk of a request has to end so that a span can follow; None where none does.

        Args:
            matched: tokens of the request whose rows exist, or are about to be restored.
        """
        state: NearRequest | None = getattr(req, STATE, None)
        if state is None or state.mode == OFF or state.prefix:
            return None
        if state.planned_at != matched:
            self._plan(req, state, matched)
        return self.next_stop(req, matched) if state.mode == ON else None

    def next_stop(self, req: Any, computed: int) -> int | None:
        """Where the next chunk of a request has to end; as :meth:`first_stop`."""
        state: NearRequest | None = getattr(req, STATE, None)
        if state is None or state.mode != ON:
            return None
        while state.spans and state.spans[0].stop - computed < self._limits.min_span:
            state.spans.pop(0)
        return state.spans[0].start if state.spans and state.spans[0].start > computed else None

    def waits(self, req: Any) -> bool:
        """Whether a request waits for another one's chunks once more; if not, it is computed."""
        state: NearRequest = getattr(req, STATE)
        state.waits += 1
        if state.waits <= _PASSES:
            return True
        self._refuse(state, Refusal.BUSY)
        return False

    def give_up(self, req: Any, reason: Refusal) -> None:
        """Compute the rest of a request."""
        self._refuse(getattr(req, STATE), reason)

    def _plan(self, req: Any, state: NearRequest, matched: int) -> None:
        state.planned_at, state.spans = matched, []
        tokens = np.frombuffer(req.full_untruncated_fill_ids, np.int64)
        if len(tokens) - matched < self._limits.min_tokens + self._limits.tail:
            return
        if not _may_reuse(req):
            self._refuse(state, Refusal.REQUEST)
            return
        reason = Refusal.NO_DONOR
        namespace = make_namespace(req.extra_key, req.cache_salt)
        for item, donor in self._donors.find(namespace, tokens):
            resident = self._resident(namespace, donor)
            if resident <= self._limits.min_tokens:
                self._donors.remove(item)
                continue
            found = plan_spans(donor[:resident], tokens, matched, self._cache.page_size, self._limits)
            if isinstance(found, Refusal):
                reason = found
            elif sum(map(len, found)) > sum(map(len, state.spans)):
                state.spans, state.donor, state.tokens = found, item, donor
        if not state.spans:
            self._refuse(state, reason)
            return
        self._donors.used(state.donor)
        self.stats.planned_tokens += sum(map(len, state.spans))
        self._cache.decisions.record("near_miss", spans=len(state.spans), tokens=sum(map(len, state.spans)))

    def _refuse(self, state: NearRequest, reason: Refusal) -> None:
        state.spans = []
        self.stats.refusals[reason.value] += 1
        self._cache.decisions.record(f"near_miss_refused/{reason.value}")

    def _resident(self, namespace: Namespace | None, donor: np.ndarray) -> int:
        _, last = self._cache.trie.match(_key(donor, namespace))
        return last.stop

    # -- while it runs --------------------------------------------------------------------------------------------

    def owns_rows(self, req: Any) -> bool:
        """Whether the rows of a request stay out of the trie."""
        state = getattr(req, STATE, None)
        return state is not None and state.owned_from >= 0

    def computed(self, req: Any, up_to: int) -> None:
        """Exact rows of a request, up to ``up_to``, are in the trie now."""
        state: NearRequest | None = getattr(req, STATE, None)
        if state is None or state.prefix or up_to < len(req.origin_input_ids):
            return
        self._replace(req, up_to)
        if _may_give(req):
            namespace = make_namespace(req.extra_key, req.cache_salt)
            if state.mode == REPORT and state.spans:
                self._report(req, state, namespace)
            self._donors.add(namespace, req.full_untruncated_fill_ids[:up_to])

    def graft(self, req: Any) -> None:
        """Give a request that has been computed up to the start of a span the rows of that span."""
        state: NearRequest | None = getattr(req, STATE, None)
        start = req.prefix_len
        if state is None or state.mode != ON or not state.spans or start < state.spans[0].start:
            return
        if start % self._cache.page_size or start != req.kv.kv_allocated_len:
            return
        span = state.spans.pop(0)
        if span.stop - start < self._limits.min_span:
            return
        donor = span.donor + start - span.start
        filled = self._filled(req, state, donor, start, span.stop - start)
        if isinstance(filled, Refusal):
            self._refuse(state, filled)
            return
        self._cache.req_to_token_pool.write((req.kv.req_pool_idx, slice(start, span.stop)), filled)
        if state.owned_from < 0:
            state.owned_from = req.kv.cache_protected_len
            self.stats.requests += 1
        req.kv.kv_allocated_len = req.kv.kv_committed_len = span.stop
        req.prefix_len = req.extend_end = span.stop
        state.grafted += len(filled)
        self.stats.grafts += 1
        self.stats.tokens += len(filled)
        self._cache.decisions.record("graft", start=start, stop=span.stop, donor=donor)

    def _filled(self, req: Any, state: NearRequest, donor: int, start: int, length: int) -> Any:
        """New slots with the rows of positions ``[donor, donor + length)`` of the donor, turned to ``start``."""
        assert state.tokens is not None
        cache, namespace = self._cache, make_namespace(req.extra_key, req.cache_salt)
        if not self._mover.can_shift(donor, length, start - donor):
            return Refusal.REQUEST
        whole_pages = -(-(donor + length) // cache.page_size) * cache.page_size
        hot, last = cache.trie.match(_key(state.tokens[:whole_pages], namespace))
        if last.stop < donor + length:
            return Refusal.DONOR_GONE
        cache.trie.pin(last)
        cache.trie.lock(hot)
        try:
            slots = cache._allocate(length)
            if slots is None:
                return Refusal.NO_ROOM
            if not cache.agree_min(int(self._fill(last, donor, start, slots))):
                cache._free(slots)
                return Refusal.DONOR_GONE
        finally:
            cache.trie.unlock(hot)
            cache.trie.unpin(last)
        return slots

    def _fill(self, last: Node, donor: int, start: int, slots: Any) -> bool:
        path: list[Node] = []
        node = last
        while node.parent is not None and node.stop > donor:
            path.append(node)
            node = node.parent
        try:
            for node in reversed(path):
                low, high = max(node.start, donor), min(node.stop, donor + len(slots))
                if low >= high:
                    continue
                target = source = slots[low - donor : high - donor]
                if node.hot:
                    source = node.slots[low - node.start : high - node.start]
                else:
                    self._cache.cold.read(node, low, high, target)
                self._mover.copy(source, target, low, start - donor)
        except Exception as error:
            logger.warning("PLT cache: near-miss rows cannot be taken over: %s: %s", type(error).__name__, error)
            return False
        return True

    def _report(self, req: Any, state: NearRequest, namespace: Namespace | None) -> None:
        """How far the rows that would have been reused are from the computed ones."""
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        for span in state.spans:
            room = self._cache.token_to_kv_pool_allocator.available_size() >= len(span)
            slots = self._filled(req, state, span.donor, span.start, len(span)) if room else Refusal.NO_ROOM
            if isinstance(slots, Refusal):
                self.stats.refusals[slots.value] += 1
                continue
            measured = self._mover.deviation(slots, row[span.start : span.stop].long())
            self._cache._free(slots)
            predicted = _SCALE * span.differing / span.stop
            self.stats.report(measured)
            logger.info(
                "PLT cache: near-miss: tokens %d to %d could be reused; predicted deviation %.2g, measured %.2g",
                span.start,
                span.stop,
                predicted,
                measured,
            )
        state.spans = []

    # -- when it ends ---------------------------------------------------------------------------------------------

    def publish(self, req: Any, up_to: int) -> None:
        """Hand the rows of a request that has ended to the namespace of reused rows.

        Its exact prefix belongs to the trie already and is copied, unless that is more than is gained.
        """
        cache, state = self._cache, getattr(req, STATE)
        namespace = near_miss_namespace(make_namespace(req.extra_key, req.cache_salt))
        key = Key(req.full_untruncated_fill_ids, namespace, False, up_to)
        length, exact = key.aligned_len(cache.page_size), state.owned_from
        if length <= 2 * exact:
            return
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        copies = cache._allocate(exact) if exact else cache._no_slots
        if copies is None:
            return
        self._mover.copy(row[:exact].long(), copies, 0, 0)

        def slots(start: int, stop: int) -> Any:
            parts = [copies[start : min(stop, exact)], row[max(start, exact) : max(stop, exact)].long()]
            return torch.cat(parts)

        hot_len, node = cache.trie.insert(key, slots)
        if hot_len:
            cache._free(copies[: min(hot_len, exact)])
        if hot_len > exact:
            cache.token_to_kv_pool_allocator.free_segment(row[exact:hot_len].long(), start_pos=exact)
        req.kv.cache_protected_len = length
        cache.unlock(req.lock)
        req.lock = cache.lock(node)
        req.last_node = node
        self.stats.published += 1

    def ended(self, req: Any) -> None:
        """Forget a request."""
        state = getattr(req, STATE, None)
        if state is not None:  # its number of reused tokens is still to be reported
            setattr(req, STATE, NearRequest(grafted=state.grafted))

    def _replace(self, req: Any, up_to: int) -> None:
        """Drop reused rows of tokens that have been computed."""
        if not self.stats.published:
            return
        cache = self._cache
        namespace = near_miss_namespace(make_namespace(req.extra_key, req.cache_salt))
        _, node = cache.trie.match(Key(req.full_untruncated_fill_ids, namespace, False, up_to))
        while node.parent is not None and not (node.lock_count or node.pin_count or node.resident_children):
            parent = node.parent
            slots = cache.cold.discard(node)
            if slots is not None:
                cache._free(slots)
            node = parent


def _key(tokens: np.ndarray, namespace: Namespace | None) -> Key:
    return Key(array("q", tokens.astype(np.int64).tobytes()), namespace)


def _may_reuse(req: Any) -> bool:
    """Whether a request asks for nothing that tokens without a forward pass of their own do not give."""
    wants_logprobs = getattr(req, "return_logprob", False)
    return not (
        (wants_logprobs and 0 <= getattr(req, "logprob_start_len", -1) < len(req.origin_input_ids) - 1)
        or getattr(req, "return_hidden_states", False)
        or getattr(req, "is_retracted", False)
        or not _may_give(req)
    )


def _may_give(req: Any) -> bool:
    """Whether the rows of a request follow from its tokens."""
    return (
        getattr(req, "input_embeds", None) is None
        and getattr(req, "multimodal_inputs", None) is None
        and getattr(req, "positional_embed_overrides", None) is None
        and not getattr(req, "skip_radix_cache_insert", False)
        and not is_near_miss(make_namespace(req.extra_key, req.cache_salt))
    )
