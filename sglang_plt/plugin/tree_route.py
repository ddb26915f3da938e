"""How ``sglang-plt tree`` reaches the trie of a running server: through two routes that SGLang has, at a safe point.

``POST /set_internal_state {"server_args": {"plt_tree": ROWS, "plt_tree_tokens": N}}`` asks for a snapshot, and the
next ``GET /server_info`` carries it in ``internal_states[i]["plt_tree"]``, once. Both reach the scheduler as control
messages, which it handles between two batches, on every rank in the same order: nothing else touches the trie
meanwhile. With ``--admin-api-key`` the first needs that key, with ``--api-key`` the second needs the other.

The hooks sit on the class that answers these messages, and are put there with the cache: in the scheduler's process
only.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.plugins.hook_registry import HookType

from sglang_plt.plugin.hooks import put_in_place
from sglang_plt.snapshot import TreeSnapshot

logger = logging.getLogger(__name__)

KEY, TOKENS_KEY = "plt_tree", "plt_tree_tokens"
MAX_ROWS, MAX_TOKENS = 100_000, 1024

_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
HOOKS = (f"{_CONTROLLER}.set_internal_state", f"{_CONTROLLER}.get_internal_state")


def install() -> None:
    """Put the hooks in place; does nothing when they are.

    Raises:
        SeamError: SGLang could not apply them.
    """
    put_in_place({HOOKS[0]: (_around_set, HookType.AROUND), HOOKS[1]: (_after_get, HookType.AFTER)})


def _around_set(original: Any, controller: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = request.server_args
    clusters = getattr(controller.scheduler.tree_cache, "clusters", None)
    if KEY not in wanted or clusters is None:
        return original(controller, request, *args, **kwargs)
    known = set(wanted) <= {KEY, TOKENS_KEY}
    rows, tokens = wanted[KEY], wanted.get(TOKENS_KEY, 0)
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (rows, tokens))
    accepted = known and whole and 1 <= rows <= MAX_ROWS and 0 <= tokens <= MAX_TOKENS
    if accepted:
        controller.plt_tree_request = (rows, tokens)
    return SetInternalStateReqOutput(updated=accepted)


def _after_get(result: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = getattr(controller, "plt_tree_request", None)
    if wanted is None:
        return None
    controller.plt_tree_request = None
    started = time.perf_counter()
    clusters = controller.scheduler.tree_cache.clusters
    result.internal_state[KEY] = TreeSnapshot(clusters, max_nodes=wanted[0], token_preview=wanted[1]).plain()
    milliseconds = 1000 * (time.perf_counter() - started)
    logger.info("PLT cache: a snapshot of %d nodes took %.1f ms", clusters.trie.num_nodes, milliseconds)
    return result
