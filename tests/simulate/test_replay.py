"""The replay against the published figures, against the bound, and against itself."""

import hashlib
import os
import subprocess
import sys
from fractions import Fraction

import pytest

from sglang_plt.simulate.bound import belady
from sglang_plt.simulate.replay import POLICIES, Settings, _Run, simulate
from sglang_plt.simulate.trace import Trace
from tests.simulate.traces import generated, published
from tests.tiny_model import REPO

TABLE = {512_000: 4.5, 1_024_000: 5.4, 2_048_000: 8.6, 4_096_000: 17.8, 8_192_000: 26.3, 16_384_000: 33.2}


@pytest.fixture(scope="module")
def agents(tmp_path_factory) -> Trace:
    return generated(tmp_path_factory.mktemp("agents"))


def decisions(trace: Trace, policy: str, capacity: int) -> list[list[tuple[int, int]]]:
    """Node and units of every eviction, by request."""
    run = _Run(trace, policy, capacity, Fraction(1), Settings())
    taken: list[list[tuple[int, int]]] = []
    clear_hot = run.trie.clear_hot
    run.trie.clear_hot = lambda node: (taken[-1].append((node.id, len(node))), clear_hot(node))[1]
    for index in range(len(trace.requests)):
        taken.append([])
        run.serve(index)
    run.trie.check()
    return taken


@pytest.mark.parametrize(("capacity", "percent"), TABLE.items())
def test_lru_is_that_of_the_published_table(capacity, percent):
    assert simulate(published("conversation"), "lru", capacity).hit_rate * 100 == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize(("capacity", "times"), [(512_000, 1.5), (1_024_000, 1.6), (2_048_000, 1.5), (4_096_000, 1.12)])
def test_value_beats_lru_on_conversation(capacity, times):
    trace = published("conversation")
    assert simulate(trace, "value", capacity).hit_rate >= times * simulate(trace, "lru", capacity).hit_rate


@pytest.mark.parametrize("capacity", [2_048_000, 4_096_000])
def test_value_beats_lru_on_synthetic(capacity):
    trace = published("synthetic")
    assert simulate(trace, "value", capacity).hit_rate >= 1.06 * simulate(trace, "lru", capacity).hit_rate


def test_a_denser_store_at_equal_bytes():
    trace = published("conversation")
    dense = simulate(trace, "value", 2_048_000, Fraction(8))
    assert dense.hit_rate >= 3.5 * simulate(trace, "lru", 2_048_000).hit_rate
    assert dense.held_bytes <= 2_048_000 * Settings().token_bytes
    assert dense.hot_hits == 0


@pytest.mark.parametrize("capacity", [100_000, 400_000, 800_000])
def test_no_policy_beats_the_bound_and_value_beats_lru(agents, capacity):
    rates = {policy: simulate(agents, policy, capacity).hit_rate for policy in POLICIES}
    assert rates["belady"] == max(rates.values())
    assert rates["value"] > rates["lru"]


def test_everything_is_hit_again_where_everything_fits(agents):
    everything = {policy: simulate(agents, policy, 1 << 40) for policy in POLICIES}
    assert len({result.hot_hits for result in everything.values()}) == 1
    assert all(result.evicted_tokens == 0 for result in everything.values())


def test_bound_by_hand():
    from array import array

    from sglang_plt.simulate.trace import Request

    prompts = [[0, 1], [0, 2], [0, 1], [0, 2], [0, 3], [0, 1]]
    requests = [Request(array("q", ids), 1, False, 1024) for ids in prompts]
    # with room for two, 0 stays and so does 1; with three, 2 stays as well until its last use
    assert belady(Trace("hand", requests, 512), 2) == (7, 2)
    assert belady(Trace("hand", requests, 512), 3) == (8, 3)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "belady"])
def test_what_comes_later_changes_no_earlier_decision(agents, policy):
    half = Trace(agents.name, agents.requests[:700], agents.unit_tokens)
    assert decisions(half, policy, 400) == decisions(agents, policy, 400)[:700]


def test_decisions_do_not_depend_on_the_process(agents, tmp_path):
    script = (
        "import hashlib, pathlib\n"
        "from tests.simulate.test_replay import decisions\n"
        "from tests.simulate.traces import generated\n"
        f"trace = generated(pathlib.Path({str(tmp_path)!r}))\n"
        "print(hashlib.sha256(repr(decisions(trace, 'value', 400)).encode()).hexdigest())\n"
    )
    here = hashlib.sha256(repr(decisions(agents, "value", 400)).encode()).hexdigest()
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def test_few_replay_tokens_cost_statistics_and_never_correctness(agents):
    few = simulate(agents, "value", 400_000, settings=Settings(replay_tokens=20_000))
    assert 0 < few.hit_rate <= simulate(agents, "belady", 400_000).hit_rate


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trace: simulate(trace, "mru", 10_000), "policy 'mru' is unknown"),
        (lambda trace: simulate(trace, "lru", 511), "holds no unit of 512 tokens"),
        (lambda trace: Settings(prefill_rate=0), "prefill_rate=0 must be at least 1"),
    ],
)
def test_refusals(agents, call, message):
    with pytest.raises(ValueError, match=message):
        call(agents)
