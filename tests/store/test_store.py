"""Byte accounting of the store, and the writer thread under racing calls."""

from __future__ import annotations

import threading
import time

import pytest

from sglang_plt.blocks import BlockState, View
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
