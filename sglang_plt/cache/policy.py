"""The eviction policy of one cache: its orders, what it learns from requests, and how much of a node it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_plt.blocks import BLOCK_TOKENS
from sglang_plt.node import Node
from sglang_plt.policy import EvictionOrder, make_order
from sglang_plt.value import Rates, ValueOrder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_plt.trie import OnSplit


@dataclass(frozen=True)
class TierRates:
    """What is lost with a token of each tier, and the bytes that are won."""

    hot: Rates
    cold: Rates

    @classmethod
    def of(
        cls, prefill_ns: int, attention_ns: int, restore_ns: int = 0, row_bytes: int = 1, block_bytes: int = 0
    ) -> TierRates:
        """Rates of both tiers from what was measured.

        What eviction takes from the device is encoded, so it loses a restore and no prefill: the same for every token,
        which leaves the order to the probabilities. Without a cold tier it loses the prefill.

        Args:
            prefill_ns, attention_ns: as of :class:`Rates`.
            restore_ns: time to decode a token.
            row_bytes: bytes of a token on the device.
            block_bytes: bytes of an encoded token; 0 where there is no cold tier.
        """
        if not block_bytes:
            lost = Rates(prefill_ns, attention_ns, token_bytes=row_bytes)
            return cls(lost, lost)
        return cls(
            Rates(max(1, restore_ns), token_bytes=row_bytes),
            Rates(prefill_ns, attention_ns, restore_ns, block_bytes),
        )


class CachePolicy:
    """What :class:`sglang_plt.cache.prefix_cache.PLTRadixCache` asks of its policy.

    ``value`` learns from every request that ends with its rows published, and takes of a long node the end only.
    SGLang's own policies do neither: they evict as SGLang does.

    Args:
        name: one of :data:`sglang_plt.config.POLICIES`.
        options: keyword arguments of SGLang's policies, as of :func:`sglang_plt.policy.make_order`.
        rates: of ``value``; default: every token is worth the same.
        log: receives ``(event, **fields)`` of what is learned from.

    Attributes:
        order, lower_order: of the hot tier, and of those below.
        on_split: what the trie has to call, or None.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any] | None = None,
        rates: TierRates | None = None,
        page_size: int = 1,
        log: Callable[..., None] = lambda event, **fields: None,
    ):
        self.order: EvictionOrder = make_order(name, options)
        self.lower_order: EvictionOrder = self.order
        self.on_split: OnSplit | None = None
        self._learner: ValueOrder | None = None
        if isinstance(self.order, ValueOrder):
            self.order = self.lower_order = learner = ValueOrder(rates.hot if rates is not None else None)
            if rates is not None:
                self.lower_order = learner.in_tier(rates.cold)
            self._learner, self.on_split = learner, learner.on_split
        self.part_tokens = BLOCK_TOKENS
        self._page_size = page_size
        self._log = log

    # -- learning -------------------------------------------------------------------------------------------------

    def matched(self, req: Req, resident_len: int) -> None:
        """``resident_len`` units of what ``req`` asks are held in one tier or the other.

        Of several matches the last before it runs counts: a chunk of its prefill is no match, and what a retracted
        request finds when it comes back is its own.
        """
        if self._learner is not None and not req.retracted_stain:
            req.plt_matched_len = resident_len

    def served(self, req: Req) -> None:
        """``req`` has ended, and ``req.last_node`` is the end of what it left; once for every such request.

        What is aborted or retracted without leaving its rows teaches nothing. A namespace with a salt moves the clock
        only, as does a request shorter than a page.
        """
        if self._learner is None:
            return
        end: Node = req.last_node
        matched_len, output_len = getattr(req, "plt_matched_len", 0), len(req.output_ids)
        self._learner.observe(end, matched_len, output_len, min(end.stop, len(req.origin_input_ids)))
        self._log("served", tokens=end.stop, matched=matched_len, output=output_len)

    # -- eviction -------------------------------------------------------------------------------------------------

    def spares(self, node: Node, num_tokens: int) -> int:
        """Tokens at the front of ``node`` that stay when ``num_tokens`` are needed from it; 0 where all of it goes.

        Whole blocks leave and at least one stays, so that nodes are not cut to shreds; where rows were encoded before,
        the cut is between two of their blocks.
        """
        part = self.part_tokens
        spare = len(node) - -(-num_tokens // part) * part
        if self._learner is None or spare < part:
            return 0
        cut = spare - spare % part
        if node.views:
            cut = stop = 0
            for view in node.views:
                stop += len(view)
                if stop > spare:
                    break
                cut = stop
        cut -= cut % self._page_size
        return cut if cut >= part else 0
