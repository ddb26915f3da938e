"""One policy at one capacity over one trace, on the server's trie and policies.

A request is matched, inserted and learned from; then nodes are evicted, units at a time from the end of the node that
the policy names, until what is held fits. So a policy may let go of what has just been served: the server, too, may
take it first once the request has ended. Evicted nodes stay as replay nodes, keys without rows, up to a bound.

Capacity is given in tokens at full precision. With a codec ratio above 1 everything is held encoded, so the same bytes
hold ratio times the tokens, and every hit is a cold one that pays a restore.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sglang_plt.keys import Key
from sglang_plt.policy import make_order
from sglang_plt.simulate.bound import belady
from sglang_plt.simulate.tlru import TlruOrder
from sglang_plt.simulate.trace import Trace
from sglang_plt.trie import Node, Trie
from sglang_plt.value import Rates, ValueOrder

POLICIES = ("value", "lru", "lfu", "slru", "fifo", "tlru", "belady")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a token costs; every rate is frozen before the run.

    Attributes:
        token_bytes: bytes of a token's rows at full precision (131072: Llama-3-8B in bf16).
        prefill_rate: tokens per second that a prefill computes.
        restore_rate: tokens per second that a restore brings back.
        replay_tokens: tokens of evicted prefixes whose keys are kept.
        tlru_threshold: tokens whose prefill fits the time budget of ``tlru``.
    """

    token_bytes: int = 131072
    prefill_rate: int = 10_000
    restore_rate: int = 200_000
    replay_tokens: int = 1 << 24
    tlru_threshold: int = 2048

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Result:
    """What a policy did at one capacity.

    Attributes:
        capacity_tokens: at full precision, that is the bytes divided by ``token_bytes``.
        policy_us_per_evicted_token: time spent on learning from requests and choosing and taking victims; None for
            the bound, which is not a policy.
    """

    trace: str
    policy: str
    capacity_tokens: int
    codec_ratio: Fraction
    asked_tokens: int
    hot_hits: int
    cold_hits: int
    saved_s: float
    held_bytes: int
    evicted_tokens: int
    policy_us_per_evicted_token: float | None

    @property
    def hit_rate(self) -> float:
        return (self.hot_hits + self.cold_hits) / self.asked_tokens

    @property
    def arm(self) -> str:
        return f"{self.trace}/{self.policy}/{self.capacity_tokens}/x{float(self.codec_ratio):g}"


def simulate(
    trace: Trace,
    policy: str,
    capacity_tokens: int,
    codec_ratio: Fraction = Fraction(1),
    settings: Settings | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> Result:
    """Replay ``trace``; ``on_request`` is called after every request.

    Raises:
        ValueError: unknown policy, or a capacity that does not hold one unit.
    """
    settings = settings or Settings()
    capacity = int(capacity_tokens * codec_ratio) // trace.unit_tokens
    if capacity < 1:
        raise ValueError(f"a capacity of {capacity_tokens} tokens holds no unit of {trace.unit_tokens} tokens")
    if policy == "belady":
        hits, most = belady(trace, capacity, on_request)
        evicted, cost = 0, None
    else:
        run = _Run(trace, policy, capacity, codec_ratio, settings)
        for index in range(len(trace.requests)):
            run.serve(index)
            on_request()
        hits, most, evicted = run.hits, run.most, run.evicted * trace.unit_tokens
        cost = run.seconds * 1e6 / evicted if evicted else 0.0
    hit_tokens = hits * trace.unit_tokens
    cold = codec_ratio > 1
    per_token = 1 / settings.prefill_rate - (1 / settings.restore_rate if cold else 0)
    return Result(
        trace=trace.name,
        policy=policy,
        capacity_tokens=capacity_tokens,
        codec_ratio=codec_ratio,
        asked_tokens=trace.asked_tokens,
        hot_hits=0 if cold else hit_tokens,
        cold_hits=hit_tokens if cold else 0,
        saved_s=hit_tokens * per_token,
        held_bytes=int(most * trace.unit_tokens * settings.token_bytes / codec_ratio),
        evicted_tokens=evicted,
        policy_us_per_evicted_token=cost,
    )


def _make_order(policy: str, unit_tokens: int, codec_ratio: Fraction, settings: Settings) -> Any:
    if policy not in POLICIES or policy == "belady":
        raise ValueError(f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
    if policy == "tlru":
        return TlruOrder(settings.tlru_threshold, unit_tokens=unit_tokens)
    if policy == "value":
        rates = Rates(
            prefill_ns=max(1, 10**9 // settings.prefill_rate),
            restore_ns=10**9 // settings.restore_rate if codec_ratio > 1 else 0,
            token_bytes=max(1, int(settings.token_bytes / codec_ratio)),
        )
        return ValueOrder(rates, unit_tokens)
    return make_order(policy)


class _Run:
    """The state of one replay."""

    def __init__(self, trace: Trace, policy: str, capacity: int, codec_ratio: Fraction, settings: Settings):
        self.requests = trace.requests
        self.capacity = capacity
        self.replay_units = max(1, settings.replay_tokens // trace.unit_tokens)
        order = _make_order(policy, trace.unit_tokens, codec_ratio, settings)
        self.trie = Trie(1, order)
        self.observe: Callable[[Node, int, int], None] | None = getattr(order, "observe", None)
        self.trie.on_split = getattr(order, "on_split", None)
        self.hits = self.most = self.evicted = 0
        self.seconds = 0.0

    def serve(self, index: int) -> None:
        request, trie = self.requests[index], self.trie
        if not len(request.units):
            return
        key = Key(request.units)
        _, last = trie.match(key)
        matched = last.stop
        self.hits += matched
        if request.partial and key.length > 1:
            trie.insert(Key(request.units, length=key.length - 1), range)
            _, end = trie.insert(key, range, counted_len=key.length - 1)
        else:
            _, end = trie.insert(key, range)
        started = time.perf_counter()
        if self.observe is not None:
            self.observe(end, matched, request.output_length)
        self._evict(trie.evictable_tokens - self.capacity)
        self.seconds += time.perf_counter() - started
        self.most = max(self.most, trie.evictable_tokens)
        while trie.replay_tokens > self.replay_units and (node := trie.replay_queue.peek()) is not None:
            trie.remove(node)

    def _evict(self, units: int) -> None:
        while units > 0:
            victim = self.trie.hot_queue.peek()
            assert victim is not None
            if len(victim) > units:
                self.trie.split(victim, len(victim) - units)  # the victim is the lower part from now on
            units -= len(victim)
            self.evicted += len(victim)
            self.trie.clear_hot(victim)
