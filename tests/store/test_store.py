"""Byte accounting of the store, and the writer thread under racing calls."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.blocks import Block, BlockReference, BlockState, View
from sglang_plt.store import BlockStore, BlockWriter


def test_bytes_are_charged_once_and_given_back_once():
    store = BlockStore(100)
    view = store.add(10, 60, 0, "slots")
    view.block.refs += 1
    halves = [View(view.block, 0, 4), View(view.block, 4, 10)]
    assert store.release(halves[:1]) == 0
    assert (store.used_bytes, store.num_blocks, store.free_bytes) == (60, 1, 40)
    assert store.release(halves[1:]) == 60
    assert (store.used_bytes, store.num_blocks) == (0, 0)
    with pytest.raises(AssertionError, match="released twice"):
        store.release(halves)


def test_refuses_what_does_not_fit():
    store = BlockStore(100)
    store.add(1, 100, 0, None)
    with pytest.raises(MemoryError, match="1 bytes does not fit into 0 free bytes"):
        store.add(1, 1, 0, None)
    with pytest.raises(ValueError, match="negative, got -1"):
        BlockStore(-1)


# -- blocks that others refer to --------------------------------------------------------------------------------------


def referring(store: BlockStore, num_bytes: int, *blocks: Block) -> View:
    """A block of 10 rows that is a difference from ``blocks``."""
    references = [BlockReference(block, ((0, 0, 10),)) for block in blocks]
    store.hold(references)
    return store.add(10, num_bytes, 0, None, references=references)


def counts(store: BlockStore) -> tuple[int, int, int, int]:
    return store.used_bytes, store.num_blocks, store.num_dependants, store.num_orphans


def test_bytes_stay_while_another_block_needs_them():
    unviewed: list[Block] = []
    store = BlockStore(100, unviewed.append)
    centre = store.add(10, 50, 0, None)
    centre.block.data = b"centre"
    near, other = referring(store, 5, centre.block), referring(store, 6, centre.block)
    assert counts(store) == (61, 3, 2, 0)
    assert store.release([centre]) == 0
    assert unviewed == [centre.block]
    assert (counts(store), centre.block.data) == ((61, 3, 2, 1), b"centre")
    assert store.release([near]) == 5
    assert counts(store) == (56, 2, 1, 1)
    assert store.release([other]) == 56
    assert (counts(store), centre.block.data) == ((0, 0, 0, 0), None)
    assert unviewed == [centre.block, near.block, other.block]
    with pytest.raises(AssertionError, match=f"block {near.block.id} was released twice"):
        store.release([near])


def test_what_refers_may_go_first():
    store = BlockStore(100)
    first, second = store.add(10, 50, 0, None), store.add(10, 20, 0, None)
    near = referring(store, 5, first.block, second.block)
    assert (first.block.dependants, second.block.dependants, near.block.dependants) == (1, 1, 0)
    assert store.release([near]) == 5
    assert counts(store) == (70, 2, 0, 0)
    assert store.release([first, second]) == 70
    assert counts(store) == (0, 0, 0, 0)


def test_a_hold_that_comes_to_nothing_is_undone():
    store = BlockStore(100)
    view = store.add(10, 50, 0, None)
    references = [BlockReference(view.block, ((0, 0, 10),))]
    store.hold(references)
    assert store.release([view]) == 0
    assert counts(store) == (50, 1, 0, 1)
    assert store.let_go(references) == 50
    assert counts(store) == (0, 0, 0, 0)
    with pytest.raises(AssertionError, match="was let go twice"):
        store.let_go(references)


def test_an_orphan_that_settles_changes_the_count():
    store = BlockStore(100)
    centre = store.add(10, 50, 0, None)
    near = referring(store, 5, centre.block)
    store.release([centre])
    store.settle(centre.block, 70)
    assert counts(store) == (75, 2, 1, 1)
    assert store.release([near]) == 75


class Twin:
    """What a store must count, from the views and the holds that there are."""

    def __init__(self) -> None:
        self.unviewed: list[int] = []
        self.store = BlockStore(1 << 30, lambda block: self.unviewed.append(block.id))
        self.views: list[View] = []
        self.holds: list[list[BlockReference]] = []
        self.blocks: list[Block] = []
        self.references: dict[int, tuple[BlockReference, ...]] = {}

    def check(self) -> None:
        viewed = {view.block for view in self.views}
        by_blocks = [reference.block for block in viewed for reference in self.references[block.id]]
        held = by_blocks + [reference.block for references in self.holds for reference in references]
        alive = viewed | set(held)
        dependants = sum(bool(self.references[block.id]) for block in alive)
        used = sum(block.num_bytes for block in alive)
        assert counts(self.store) == (used, len(alive), dependants, len(alive - viewed))
        assert sorted(self.unviewed) == sorted(block.id for block in self.blocks if block not in viewed)
        for block in self.blocks:
            assert (block.data is not None) == (block in alive)
            assert block.dependants == held.count(block)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_counts_are_those_of_the_blocks_alive(data):
    twin = Twin()
    store = twin.store
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["add", "add", "hold", "let_go", "share", "settle", "release", "release"]))
        before = store.used_bytes
        offered = sorted({view.block for view in twin.views if not view.block.references}, key=lambda block: block.id)
        picked = data.draw(st.lists(st.sampled_from(offered), max_size=3, unique=True)) if offered else []
        references = tuple(BlockReference(block, ((0, 0, 4),)) for block in picked)
        if step == "add":
            store.hold(references)
            view = store.add(10, data.draw(st.integers(0, 9)), 0, None, references=references)
            view.block.data = b"bytes"
            twin.views.append(view)
            twin.blocks.append(view.block)
            twin.references[view.block.id] = references
        elif step == "hold":
            store.hold(references)
            twin.holds.append(list(references))
        elif step == "let_go" and twin.holds:
            freed = store.let_go(twin.holds.pop(data.draw(st.integers(0, len(twin.holds) - 1))))
            assert freed == before - store.used_bytes
        elif step == "share" and twin.views:
            view = data.draw(st.sampled_from(twin.views))
            view.block.refs += 1
            twin.views.append(view)
        elif step == "settle" and twin.views:
            store.settle(data.draw(st.sampled_from(twin.views)).block, data.draw(st.integers(0, 20)))
        elif step == "release" and twin.views:
            many = data.draw(st.lists(st.integers(0, len(twin.views) - 1), min_size=1, max_size=4, unique=True))
            going = [twin.views[index] for index in many]
            twin.views = [view for index, view in enumerate(twin.views) if index not in many]
            assert store.release(going) == before - store.used_bytes
        twin.check()
    store.release(twin.views)
    for references in twin.holds:
        store.let_go(references)
    assert counts(store) == (0, 0, 0, 0)


# -- the writer -------------------------------------------------------------------------------------------------------


def blocks(count: int) -> list:
    store = BlockStore(count)
    return [store.add(1, 1, i, f"slots{i}").block for i in range(count)]


def test_finish_waits_for_the_worker_or_does_the_work():
    started, go = threading.Event(), threading.Event()

    def encode(block):
        if block.position == 0:
            started.set()
            go.wait(5)
        return f"bytes{block.position}"

    writer = BlockWriter(encode, lambda block, error: None)
    first, second = blocks(2)
    writer.submit([first, second])
    assert started.wait(5)
    threading.Timer(0.05, go.set).start()
    assert writer.finish(second) is False  # encoded here, ahead of the worker
    assert writer.finish(first) is True or first.state is BlockState.READY
    assert (first.data, second.data) == ("bytes0", "bytes1")
    assert first.slots is second.slots is None
    writer.close()


@pytest.mark.parametrize("background", [False, True])
def test_what_a_block_refers_to_is_encoded_before_it(background):
    encoded: list[Block] = []
    writer = BlockWriter(lambda block: encoded.append(block) or b"x", lambda block, error: None, background)
    store = BlockStore(100)
    centres = [store.add(10, 1, 0, None).block for _ in range(3)]
    near = referring(store, 1, *centres).block
    writer.submit([near, centres[0]])
    writer.finish(near)
    assert encoded[-1] is near
    writer.drain()
    assert sorted(block.id for block in encoded) == [1, 2, 3, 4]
    writer.close()


def test_a_failure_is_told_and_the_worker_lives():
    failures = []

    def encode(block):
        if block.position == 0:
            raise ValueError("no")
        return b"x"

    writer = BlockWriter(encode, lambda block, error: failures.append((block.id, str(error))))
    pair = blocks(2)
    writer.submit(pair)
    writer.drain()
    assert failures == [(pair[0].id, "no")]
    assert [block.state for block in pair] == [BlockState.FAILED, BlockState.READY]
    writer.close()


def test_released_blocks_are_skipped():
    encoded = []
    gate = threading.Event()

    def encode(block):
        gate.wait(5)
        encoded.append(block.position)
        return b"x"

    writer = BlockWriter(encode, lambda block, error: None)
    pair = blocks(3)
    writer.submit(pair)
    time.sleep(0.05)
    pair[1].refs = 0
    gate.set()
    writer.drain()
    assert encoded == [0, 2]
    writer.close()


def test_cancel_waits_for_the_block_in_work():
    running, reads = threading.Event(), []

    def encode(block):
        running.set()
        time.sleep(0.05)
        reads.append(block.position)
        return b"x"

    writer = BlockWriter(encode, lambda block, error: None)
    many = blocks(5)
    writer.submit(many)
    assert running.wait(5)
    writer.cancel()
    after = list(reads)
    time.sleep(0.1)
    assert reads == after
    writer.close()


def test_many_threads_finish_each_block_once():
    counts: dict[int, int] = {}
    lock = threading.Lock()

    def encode(block):
        with lock:
            counts[block.position] = counts.get(block.position, 0) + 1
        return b"x"

    writer = BlockWriter(encode, lambda block, error: None)
    many = blocks(300)
    writer.submit(many)
    callers = [threading.Thread(target=lambda: [writer.finish(block) for block in many]) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    writer.drain()
    assert counts == dict.fromkeys(range(300), 1)
    writer.close()
