"""The offline bound: what a policy that knows the future could hold.

Belady's rule (IBM Systems Journal 1966) on units, the longest wait first and the deeper of equals. A prefix is used
whenever what lies behind it is, so the rule never drops a prefix before its continuation, and units that no request
asks for again take no room. No policy hits more units at this capacity.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable

from sglang_plt.simulate.trace import Trace

_NEVER = 1 << 62


def belady(trace: Trace, capacity_units: int, on_request: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """(units hit, most units held at a time) over ``trace``."""
    paths = _prefixes(trace)
    next_use = _next_uses(paths)
    held: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, prefix)
    hits = most = 0
    for path, uses in zip(paths, next_use, strict=True):
        whole = True
        for depth, (prefix, use) in enumerate(zip(path, uses, strict=True)):
            whole = whole and prefix in held
            hits += whole
            if use == _NEVER:
                held.pop(prefix, None)
            else:
                held[prefix] = use
                heapq.heappush(heap, (-use, -depth, prefix))
        while len(held) > capacity_units:
            use, _, prefix = heapq.heappop(heap)
            if held.get(prefix) == -use:
                del held[prefix]
        most = max(most, len(held))
        on_request()
    return hits, most


def _prefixes(trace: Trace) -> list[array[int]]:
    """Every request as numbers of its prefixes: equal numbers are equal prefixes, whatever ids the trace uses."""
    numbers: dict[tuple[int, int], int] = {}
    paths = []
    for request in trace.requests:
        path, before = array("q"), -1
        for unit in request.units:
            before = numbers.setdefault((before, unit), len(numbers))
            path.append(before)
        paths.append(path)
    return paths


def _next_uses(paths: list[array[int]]) -> list[array[int]]:
    """For every prefix of every request, the next request that has it."""
    last: dict[int, int] = {}
    uses = []
    for index in range(len(paths) - 1, -1, -1):
        uses.append(array("q", (last.get(prefix, _NEVER) for prefix in paths[index])))
        for prefix in paths[index]:
            last[prefix] = index
    uses.reverse()
    return uses
