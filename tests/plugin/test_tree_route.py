"""The way of a snapshot out of the scheduler, on SGLang's own controller with the scheduler faked."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import (
    GetInternalStateReq,
    GetInternalStateReqOutput,
    SetInternalStateReq,
    SetInternalStateReqOutput,
)
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_plt.clusters import Clusters
from sglang_plt.plugin import tree_route
from sglang_plt.plugin.seams import SEAMS, SeamError
from tests.test_probability import make_trie


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch):
    """One of a scheduler on our cache; what SGLang itself would answer is faked."""
    monkeypatch.setattr(
        SchedulerInternalStateController,
        "get_internal_state",
        lambda self, request: GetInternalStateReqOutput(internal_state={"theirs": 1}),
    )
    monkeypatch.setattr(
        SchedulerInternalStateController,
        "set_internal_state",
        lambda self, request: SetInternalStateReqOutput(updated="known" in request.server_args),
    )
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    tree_route.install()
    tree_route.install()
    cache = SimpleNamespace(clusters=Clusters(make_trie([[1, 2, 3], [1, 5]]), 8.0))
    return SchedulerInternalStateController(SimpleNamespace(tree_cache=cache), record_step_time=False)


def ask(controller, **server_args) -> bool:
    return controller.set_internal_state(SetInternalStateReq(server_args=server_args)).updated


def state(controller) -> dict:
    return controller.get_internal_state(GetInternalStateReq()).internal_state


def test_a_snapshot_comes_once_when_asked_for(controller):
    assert state(controller) == {"theirs": 1}
    assert ask(controller, plt_tree=10)
    answer = state(controller)
    assert answer["theirs"] == 1
    assert answer["plt_tree"]["num_nodes"] == 3
    assert all("tokens" not in row for row in answer["plt_tree"]["nodes"])
    assert state(controller) == {"theirs": 1}


def test_limit_and_tokens(controller):
    assert ask(controller, plt_tree=1, plt_tree_tokens=2)
    (row,) = state(controller)["plt_tree"]["nodes"]
    assert row["tokens"] == [1]


@pytest.mark.parametrize(
    "wanted",
    [
        {"plt_tree": 0},
        {"plt_tree": float("inf")},
        {"plt_tree": float("nan")},
        {"plt_tree": 1.5},
        {"plt_tree": True},
        {"plt_tree": "5"},
        {"plt_tree": tree_route.MAX_ROWS + 1},
        {"plt_tree": 5, "plt_tree_tokens": -1},
        {"plt_tree": 5, "plt_tree_tokens": tree_route.MAX_TOKENS + 1},
        {"plt_tree": 5, "pp_max_micro_batch_size": 8},
    ],
)
def test_nonsense_is_refused(controller, wanted):
    assert not ask(controller, **wanted)
    assert state(controller) == {"theirs": 1}


def test_what_is_not_ours_is_sglangs(controller):
    assert ask(controller, known=1)
    assert not ask(controller, unknown=1)
    controller.scheduler.tree_cache = SimpleNamespace()
    assert not ask(controller, plt_tree=5)
    assert state(controller) == {"theirs": 1}


def test_a_hook_that_failed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_route, "HOOKS", (f"{tree_route.HOOKS[0]}_gone", tree_route.HOOKS[1]))
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(SeamError, match=r"set_internal_state_gone.* could not be hooked"):
        tree_route.install()


def test_every_hook_is_in_the_table():
    members = {f"{seam.path}.{member}" for seam in SEAMS for member in seam.members}
    assert set(tree_route.HOOKS) <= members
