"""Near-miss reuse in a running cache: plans a request's spans, fills them from a donor, keeps them apart from the rest.

A request that was given rows of a donor owns them, and all that it computes behind them, until it ends: nothing of it
enters the trie meanwhile but the exact rows before its first span. What it leaves goes into a namespace of its own (see
:func:`sglang_plt.keys.near_miss_namespace`), where requests that accept reused rows find it; it is no donor, no
reference of other blocks, and goes when the same tokens are computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_plt.cache.donor_rows import DonorRows, Mover
from sglang_plt.cache.near_request import (
    MODES,
    OFF,
    ON,
    REPORT,
    STATE,
    NearRequest,
    asked_mode,
    last_to_reuse,
    may_give,
    may_reuse,
    state_of,
)
from sglang_plt.cache.near_stats import NearMissStats
from sglang_plt.cache.near_tree import NearTree
from sglang_plt.keys import Key, Namespace, make_namespace, near_miss_namespace
from sglang_plt.near_miss import Donors, Limits, Refusal, Span, plan_spans
from sglang_plt.node import Node

if TYPE_CHECKING:
    from sglang_plt.cache.prefix_cache import PLTRadixCache

logger = logging.getLogger(__name__)

_PASSES = 8  # that a request waits for another one's chunks
_SAMPLES, _SAMPLE = 4, 64  # of a span, and tokens of each


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
        self._rows = DonorRows(cache, mover)
        self._tree = NearTree(cache, mover)
        self.stats = NearMissStats()

    def clear(self) -> None:
        """Forget all donors, and what was reused."""
        self._donors.clear()
        self._tree.clear()

    # -- before a request runs ------------------------------------------------------------------------------------

    def mode_of(self, req: Any) -> str:
        """What a request gets; where it asks for something unknown, nothing."""
        asked = asked_mode(req)
        if asked is None:
            return self._mode
        if asked not in MODES:
            return OFF
        return asked if self._override or MODES.index(asked) < MODES.index(self._mode) else self._mode

    def match(self, req: Any, key: Key, exact: int) -> tuple[Node, Node] | None:
        """What :meth:`sglang_plt.trie.Trie.match` finds among reused rows, where that is more and ``req`` accepts it.

        Args:
            exact: tokens that are there without reuse.
        """
        state = state_of(req)
        if state is None:
            state = NearRequest()
            setattr(req, STATE, state)
            self._check_mode(req, state)
        state.mode, state.prefix = self.mode_of(req), False
        found = self._tree.match(key) if state.mode == ON else None
        if found is None or found[1].stop < exact + self._limits.min_span:
            return None
        state.prefix, state.grafted = True, found[1].stop - exact
        return found

    def namespace_of(self, req: Any) -> Namespace | None:
        """Where the rows of a request belong."""
        namespace = make_namespace(req.extra_key, req.cache_salt)
        state = state_of(req)
        return near_miss_namespace(namespace) if state is not None and state.prefix else namespace

    def first_stop(self, req: Any, matched: int) -> int | None:
        """Where the first chunk of a request has to end so that a span can follow; None where none does.

        Args:
            matched: tokens of the request whose rows exist, or are about to be restored.
        """
        state = state_of(req)
        if state is None or state.mode == OFF or state.prefix:
            return None
        if state.planned_at != matched:
            self._plan(req, state, matched)
        return self.next_stop(req, matched) if state.mode == ON else None

    def next_stop(self, req: Any, computed: int) -> int | None:
        """Where the next chunk of a request has to end; as :meth:`first_stop`."""
        state = state_of(req)
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
        end = last_to_reuse(req)
        if min(end, len(tokens) - self._limits.tail) - matched < self._limits.min_tokens:
            return
        if not may_reuse(req):
            self._refuse(state, Refusal.REQUEST)
            return
        reason = Refusal.NO_DONOR
        namespace = make_namespace(req.extra_key, req.cache_salt)
        for item, donor in self._donors.find(namespace, tokens):
            resident = self._rows.resident(namespace, donor)
            if resident <= self._limits.min_tokens:
                self._donors.remove(item)
                continue
            found = plan_spans(donor[:resident], tokens, matched, self._cache.page_size, self._limits, end)
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

    def _check_mode(self, req: Any, state: NearRequest) -> None:
        asked = asked_mode(req)
        if asked is not None and asked not in MODES:
            self._refuse(state, Refusal.UNKNOWN_MODE)
            logger.warning(
                "PLT cache: near-miss: request %s has %s=%.40r in its custom_params and is computed: it can be %s",
                req.rid,
                STATE,
                asked,
                ", ".join(MODES),
            )

    def _refuse(self, state: NearRequest, reason: Refusal) -> None:
        state.spans = []
        self.stats.refusals[reason.value] += 1
        self._cache.decisions.record(f"near_miss_refused/{reason.value}")

    # -- while it runs --------------------------------------------------------------------------------------------

    def owns_rows(self, req: Any) -> bool:
        """Whether the rows of a request stay out of the trie."""
        state = state_of(req)
        return state is not None and state.owned_from >= 0

    def computed(self, req: Any, up_to: int) -> None:
        """Exact rows of a request, up to ``up_to``, are in the trie now."""
        state = state_of(req)
        if state is None or state.prefix or up_to < len(req.origin_input_ids):
            return
        self._tree.replace(req, up_to)
        if may_give(req):
            namespace = make_namespace(req.extra_key, req.cache_salt)
            if state.mode == REPORT and state.spans:
                self._report(req, state, namespace)
            self._donors.add(namespace, req.full_untruncated_fill_ids[:up_to])

    def graft(self, req: Any) -> None:
        """Give a request that has been computed up to the start of a span the rows of that span."""
        state = state_of(req)
        start = req.prefix_len
        if state is None or state.mode != ON or not state.spans or start < state.spans[0].start:
            return
        if start % self._cache.page_size or start != req.kv.kv_allocated_len:
            return
        span = state.spans.pop(0)
        if span.stop - start < self._limits.min_span:
            return
        donor = span.donor + start - span.start
        assert state.tokens is not None
        namespace = make_namespace(req.extra_key, req.cache_salt)
        filled = self._rows.take(namespace, state.tokens, donor, span.stop - start, start)
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

    def _report(self, req: Any, state: NearRequest, namespace: Namespace | None) -> None:
        """How far the rows that would have been reused are from the computed ones, by samples of each span."""
        for span in state.spans:
            found = [self._deviation(req, state, namespace, span, at) for at in self._samples(len(span))]
            measured = [value for value in found if value is not None]
            if not measured:
                self.stats.refusals[Refusal.NO_ROOM.value] += 1
                continue
            mean = sum(measured) / len(measured)
            self.stats.report(mean)
            logger.info(
                "PLT cache: near-miss: tokens %d to %d could be reused; predicted deviation %.2g, measured %.2g",
                span.start,
                span.stop,
                span.predicted_deviation,
                mean,
            )
        state.spans = []

    def _samples(self, length: int) -> list[int]:
        """Where samples of so many tokens begin, evenly."""
        free = max(0, length - max(_SAMPLE, self._cache.page_size))
        return sorted({number * free // (_SAMPLES - 1) for number in range(_SAMPLES)})

    def _deviation(
        self, req: Any, state: NearRequest, namespace: Namespace | None, span: Span, at: int
    ) -> float | None:
        """Of one sample, ``at`` tokens into ``span``."""
        assert state.tokens is not None
        count = min(max(_SAMPLE, self._cache.page_size), len(span))
        slots = self._rows.take(namespace, state.tokens, span.donor + at, count, span.start + at)
        if isinstance(slots, Refusal):
            return None
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        computed = row[span.start + at : span.start + at + count].long()
        deviation = self._mover.deviation(slots, computed)
        self._cache._free(slots)
        return deviation

    # -- when it ends ---------------------------------------------------------------------------------------------

    def publish(self, req: Any, up_to: int) -> None:
        """Hand the rows of a request that has ended to those who accept reused ones."""
        state = state_of(req)
        assert state is not None
        self.stats.published += self._tree.publish(req, up_to, state.owned_from)

    def ended(self, req: Any) -> None:
        """Forget a request."""
        state = state_of(req)
        if state is not None:  # its number of reused tokens is still to be reported
            setattr(req, STATE, NearRequest(grafted=state.grafted))
