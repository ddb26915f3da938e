"""The ``value`` policy: its statistics and queue against slow twins, its walls, and integers all the way."""

import ast
import random
from array import array
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from sglang_plt import hazard, lanes, value
from sglang_plt.blocks import Block, View
from sglang_plt.hazard import BOUNDS, HORIZON, ONE, HazardTable, bracket_of, indices_of
from sglang_plt.keys import Key
from sglang_plt.lanes import LaneQueue
from sglang_plt.policy import EvictionQueue, make_order, make_queue
from sglang_plt.trie import Trie
from sglang_plt.value import MAX_NAMESPACES, Rates, ValueOrder


def insert(trie, tokens, namespace=None):
    key = Key(array("q", tokens), namespace)
    matched = trie.match(key)[1].stop
    return matched, trie.insert(key, range)[1]


def serve(trie, order, tokens, output=100, namespace=None):
    matched, end = insert(trie, tokens, namespace)
    order.observe(end, matched, output)
    return end


def make_trie(**rates):
    order = ValueOrder(Rates(**rates))
    trie = Trie(1, order)
    trie.on_split = order.on_split
    return trie, order


def random_requests(seed, count):
    """Sessions that grow, some of which never return."""
    rng = random.Random(seed)
    sessions = []
    for number in range(count):
        if not sessions or rng.random() < 0.4:
            sessions.append([rng.randrange(3), 1000 + number])
        session = sessions[max(0, len(sessions) - 1 - int(rng.expovariate(0.2)))]
        session += [rng.randrange(10**6) for _ in range(rng.randint(1, 6))]
        yield list(session), rng.choice((1, 20, 400))


# -- statistics -------------------------------------------------------------------------------------------------------


def test_brackets():
    assert BOUNDS[:4] == (0, 2, 4, 8)
    ages = (0, 1, 2, 3, 4, 7, 8, HORIZON - 1, HORIZON, 10**9)
    assert [bracket_of(age) for age in ages] == [0, 0, 1, 1, 2, 2, 3, 13, 14, 14]


def test_counts_are_those_of_a_recount():
    rng = random.Random(1)
    table, classes = HazardTable(), [(0, 1), (0, 2), (1, 1)]
    uses, waiting = [], {}  # (class, when, tokens, reused at or None)
    for now in range(1, 700):
        table.advance(now)
        if waiting and rng.random() < 0.4:
            key = rng.choice(sorted(waiting))
            cls, when, tokens = waiting.pop(key)
            table.reused(cls, when, tokens)
            uses.append((cls, when, tokens, now))
        if rng.random() < 0.8:
            cls, tokens = rng.choice(classes), rng.randint(1, 50)
            table.used(cls, tokens)
            waiting[now] = (cls, now, tokens)
    uses += [(*use, None) for use in waiting.values()]
    for cls in ((), (0,), (1,), *classes):
        mine = [use for use in uses if use[0][: len(cls)] == cls]
        for bracket, bound in enumerate(BOUNDS):
            exposed = sum(tokens for _, when, tokens, again in mine if min(again or 699, 699) - when >= bound)
            # what came back in the request that would have been its first in the bracket counts as exposed
            reused = sum(tokens for _, when, tokens, again in mine if again and bracket_of(again - when) == bracket)
            assert table._counts[cls].exposed[bracket] == exposed
            assert table._counts[cls].reused[bracket] == reused


def test_index_is_the_best_rate_over_all_waits():
    rng = random.Random(2)
    widths = [*(stop - start for start, stop in pairwise(BOUNDS)), HORIZON]
    for _ in range(20):
        hazards = [rng.randrange(ONE // 4) for _ in BOUNDS]
        for bracket, index in enumerate(indices_of(hazards)):
            alive, held, best = Fraction(1), Fraction(0), Fraction(0)
            for k in range(bracket, len(BOUNDS)):
                chance = Fraction(hazards[k], ONE)
                held += alive * (1 - chance / 2) * widths[k]
                alive *= 1 - chance
                best = max(best, (1 - alive) / held)
            assert index == pytest.approx(float(best * (1 << 40)), rel=1e-3)


def test_index_is_straight_between_brackets():
    table = HazardTable()
    for now in range(1, 200):
        table.advance(now)
        table.count_request(10)
        if now > 5:
            table.reused((1,), now - 5, 10)
        table.used((1,), 10)
    table.advance(256)
    four, eight = table.index((1,), 4), table.index((1,), 8)
    assert four > 2 * eight
    assert [table.index((1,), age) for age in (5, 6, 7)] == [(four * (8 - a) + eight * (a - 4)) // 4 for a in (5, 6, 7)]
    assert table.index((1,), HORIZON) == table.index((1,), 10 * HORIZON)


def test_hazards_at_the_edges():
    assert indices_of([0] * len(BOUNDS)) == [0] * len(BOUNDS)
    assert all(index > 0 for index in indices_of([ONE] * len(BOUNDS)))


def test_rare_classes_lean_on_their_shorter_class():
    table = HazardTable()
    for now in range(1, 300):
        table.advance(now)
        table.count_request(10)
        if now > 1:
            table.reused((1, 1), now - 1, 10)
        table.used((1, 1), 10)
    assert table.hazards((1, 2)) == table.hazards((1,)), "a class never seen is its shorter class"
    assert table.hazards((1, 1))[0] > ONE // 2


def test_sessions_that_return_are_worth_more_than_those_that_do_not():
    trie, order = make_trie()
    for number in range(600):
        serve(trie, order, [1, number, 0], output=2000)  # long answers, never again
        turns = [2, number // 4, *range(number % 4 + 1)]
        serve(trie, order, turns, output=1)
    one_shot = serve(trie, order, [1, 10**6, 0], output=2000)
    session = serve(trie, order, [2, 10**6, 0], output=1)
    assert order(session) > order(one_shot)


# -- queue ------------------------------------------------------------------------------------------------------------


def offers(trie, order):
    """The slow twin: of every lane its oldest and its newest node, least first."""
    by_lane = {}
    for node in trie.nodes():
        if node.queue is trie.hot_queue:
            record = order.record(node)
            by_lane.setdefault((id(record.table), record.cls, order.saving(node)), []).append((record.when, node))
    found = []
    for lane in by_lane.values():
        for when in {min(when for when, _ in lane), max(when for when, _ in lane)}:
            found += [(*order(node), -node.start, node.id, node) for other, node in lane if other == when]
    return sorted(found, key=lambda offer: offer[:4])


def test_queue_is_its_slow_twin():
    trie, order = make_trie(attention_ns=1000)
    held = random.Random(3)
    locked = []
    for tokens, output in random_requests(3, 500):
        end = serve(trie, order, tokens, output)
        if held.random() < 0.3:
            trie.lock(end)
            locked.append(end)
        if len(locked) > 5:
            trie.unlock(locked.pop(held.randrange(len(locked))))
        while trie.evictable_tokens > 150:
            victim = trie.hot_queue.peek()
            assert victim is offers(trie, order)[0][4]
            trie.clear_hot(victim)
        trie.check()


def test_what_is_in_line_is_what_eviction_takes_and_nothing_changes():
    trie, order = make_trie()
    for tokens, output in random_requests(4, 200):
        serve(trie, order, tokens, output)
    frontier = trie.in_line(trie.hot_queue, 40)
    assert frontier == trie.in_line(trie.hot_queue, 40)
    assert sum(map(len, frontier[:-1])) < 40 <= sum(map(len, frontier))
    assert trie.hot_queue.peek() is frontier[0]
    trie.check()


@pytest.mark.parametrize("name", ["value", "lru", "lfu"])
def test_eviction_takes_what_is_in_line_with_parents(name):
    order = make_order(name)
    trie = Trie(1, order)
    trie.on_split = getattr(order, "on_split", None)
    for tokens, output in random_requests(6, 150):
        matched, end = insert(trie, tokens)
        if name == "value":
            order.observe(end, matched, output)
    locked = max(trie.nodes(), key=lambda node: node.stop)
    trie.lock(locked)
    line = trie.in_line(trie.hot_queue, 10**9)
    assert sum(map(len, line)) == trie.evictable_tokens
    for node in line:
        assert trie.hot_queue.peek() is node
        trie.clear_hot(node)
        trie.check()
    assert trie.hot_queue.peek() is None


def test_a_node_without_a_record_ages_in_the_queue():
    """Planning and tidying up are no use of it."""
    trie, order = make_trie()
    _, aborted = insert(trie, [9, 9])
    queue = trie.hot_queue
    for number in range(300):
        serve(trie, order, [7, number])
        trie.in_line(queue, 10**9)
        if number % 50 == 0:
            queue._tidy()
    (entry,) = (entry for lane in queue._lanes.values() for entry in lane.oldest if entry[4] is aborted)
    assert entry[0] == 0


def test_tiers_share_statistics():
    trie, order = make_trie(prefill_ns=100)
    lower = order.in_tier(Rates(prefill_ns=100, attention_ns=1000))
    node = serve(trie, order, [1, 2, 3])
    assert (lower.now, lower.version, lower.record(node)) == (order.now, order.version, order.record(node))
    assert lower(node)[1] == order(node)[1] == 1
    queue = lower.make_queue()
    assert order.record(node).when == 1, "only the order that learns forgets"
    assert queue.peek() is None


def test_a_tier_values_a_node_by_the_bytes_of_its_blocks():
    trie, order = make_trie(prefill_ns=100)
    rates = Rates(prefill_ns=1000, attention_ns=100, token_bytes=50)
    lower = order.in_tier(rates)
    node = serve(trie, order, range(4))
    small, large = (Block(id, 8, num_bytes, 0) for id, num_bytes in ((1, 16), (2, 400)))
    assert lower.saving(node) == rates.saving(0)
    trie.set_views(node, [View(small, 0, 4)])
    assert lower.saving(node) == rates.saving(0, 2) > 20 * rates.saving(0)
    node.views = [View(small, 6, 8), View(large, 0, 2)]  # 4 + 100 bytes for 4 tokens
    assert lower.saving(node) == rates.saving(0, 26)
    assert order.saving(node) == Rates(prefill_ns=100).saving(0), "slots are worth what they are worth"
    small.num_bytes = large.num_bytes = 0
    assert lower.saving(node) == rates.saving(0, 1)
    small.num_bytes = 8 * 50
    node.views = [View(small, 0, 4)]
    assert lower.saving(node) == rates.saving(0)


def test_a_tier_counts_tokens_and_not_units():
    order = ValueOrder(Rates(), unit_tokens=16)
    lower, trie = order.in_tier(Rates(prefill_ns=1000, token_bytes=50)), Trie(1, order)
    node = serve(trie, order, range(4))
    trie.set_views(node, [View(Block(1, 4, 64 * 5, 0), 0, 4)])
    assert lower.saving(node) == lower.rates.saving(0, 5)


def test_the_share_is_that_of_the_prompt():
    for prompt, share in ((None, 0), (6, 1), (3, 2)):
        trie, order = make_trie()
        end = insert(trie, range(10))[1]
        order.observe(end, 3, 0, prompt)
        assert order.record(end).cls[2] == share


def test_every_order_has_its_queue():
    assert isinstance(make_queue(make_order("value")), LaneQueue)
    assert isinstance(make_queue(ValueOrder().in_tier(Rates())), LaneQueue)
    assert isinstance(make_queue(make_order("lru")), EvictionQueue)
    with pytest.raises(ValueError, match="does not take the options"):
        make_order("value", {"protected_threshold": 2})


def test_work_per_eviction_is_bounded():
    trie, order = make_trie()
    for number in range(2000):
        serve(trie, order, [number % 7, number, 1, 2], output=number % 500)
    queue = trie.hot_queue
    looked = 0
    look_at = queue._look_at

    def counting(key):
        nonlocal looked
        looked += 1
        look_at(key)

    queue._look_at = counting
    queue.peek()
    looked = 0
    for _ in range(500):
        trie.clear_hot(queue.peek())
    assert looked <= 500 * 6


# -- memory and walls -------------------------------------------------------------------------------------------------


def test_records_of_removed_nodes_go_and_old_nodes_count_as_old():
    trie, order = make_trie()
    kept = serve(trie, order, [5, 5])
    for number in range(HORIZON + 50):
        serve(trie, order, [7, number])
        while trie.evictable_tokens > 60:
            victim = trie.hot_queue.peek()
            if victim is kept:
                break
            trie.clear_hot(victim)
        while trie.replay_tokens > 10:
            trie.remove(trie.replay_queue.peek())
        if kept.slots is None:
            break
    assert len(order._records) <= HORIZON + 200
    order._log.clear()
    order._records.clear()
    order._forgotten = trie.clock
    assert order.record(kept).when == order.now - HORIZON


def test_a_cleared_trie_starts_without_nodes_and_with_what_was_learned():
    trie, order = make_trie()
    for tokens, output in random_requests(5, 100):
        serve(trie, order, tokens, output)
    counts = order._common._counts[()].exposed[0]
    trie.clear()
    assert not order._records
    assert order._common._counts[()].exposed[0] == counts > 0
    serve(trie, order, [1, 2, 3])
    assert trie.hot_queue.peek() is not None


def test_namespaces_learn_apart_and_salted_ones_feed_nothing():
    trie, order = make_trie()
    serve(trie, order, [1, 2, 3])
    before = {key: counts.exposed[0] for key, counts in order._common._counts.items()}
    salted = serve(trie, order, [1, 2, 3], namespace=(None, "salt"))
    named = serve(trie, order, [1, 2, 3], namespace=("tenant", None))
    serve(trie, order, [1, 2, 3], namespace=(None, "salt"))
    assert {key: counts.exposed[0] for key, counts in order._common._counts.items()} == before
    assert not any(any(counts.reused) for counts in order._common._counts.values())
    assert order.record(salted).table is order._common
    assert order.record(named).table is not order._common
    for number in range(2 * MAX_NAMESPACES):
        serve(trie, order, [1], namespace=(f"tenant {number}", None))
    assert len(order._tables) == MAX_NAMESPACES + 1


def test_a_split_keeps_the_past_of_both_parts():
    trie, order = make_trie()
    lower = serve(trie, order, [1, 2, 3, 4])
    upper = trie.split(lower, 2)
    assert order.record(upper) == order.record(lower)
    assert order.record(upper).when == 1


def test_a_request_without_a_whole_page_moves_the_clock_only():
    trie, order = make_trie()
    order.observe(trie.root, 0, 5)
    assert order.now == 1
    assert not order._records


# -- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [hazard, lanes, value])
def test_no_float_no_clock_no_torch(module):
    tree = ast.parse(Path(module.__file__).read_text())
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), ast.dump(node)
        assert not (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)), ast.dump(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"time", "random", "math", "torch", "sglang", "numpy"}


def test_rates():
    assert Rates(attention_ns=50_000).saving(1 << 20) > Rates(attention_ns=50_000).saving(0)
    assert Rates().saving(0) == Rates().saving(1 << 20)
    assert Rates(prefill_ns=10, restore_ns=100).saving(0) == 1, "a restore slower than the prefill still has an order"
    with pytest.raises(TypeError, match=r"prefill_ns=1\.5 must be an integer"):
        Rates(prefill_ns=1.5)
    with pytest.raises(ValueError, match="token_bytes=0 is too small"):
        Rates(token_bytes=0)
