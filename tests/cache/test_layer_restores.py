"""Restores beside the forward pass: order, failure as a whole or not at all, and slots that go to others meanwhile."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from sglang_plt.cache.layer_restores import LayerRestores
from tests.cache.coded import PROMPT, SLOTS
from tests.cache.fake_device import FORWARD, SCHEDULE, SIDE, FakeDevice
from tests.cache.harness import Request
from tests.cache.layer_harness import LAYERS, LayerHarness, made

OTHER = array("q", range(400, 100, -1))
SHORT, BESIDE = array("q", range(1, 101)), array("q", range(150, 290))
ORDERS = [FORWARD, SIDE, SCHEDULE, *range(5)]


def admitted(harness: LayerHarness, prompt: array) -> Request:
    request = Request("r", array("q", prompt))
    harness.admit(request)
    return request


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_no_layer_is_read_before_it_is_written(order):
    harness = made()
    request = admitted(harness, PROMPT)
    assert harness.cache.stats.restored_tokens == len(PROMPT) - 1
    harness.forward()
    harness.finish(order)
    harness.release(request, checkpoint=True)
    harness.check()


def test_a_layer_is_decoded_while_the_pass_runs_the_one_below():
    harness = made()
    admitted(harness, PROMPT)
    two_blocks = ["write 0", "write 0"]
    assert harness.device.handed == two_blocks  # the first layer comes before anything is promised
    harness.forward()
    expected = list(two_blocks)
    for layer in range(LAYERS):
        expected += [f"store {layer}"] + [f"write {layer + 1}"] * 2 * (layer + 1 < LAYERS) + [f"read {layer}"]
    assert harness.device.handed == expected
    assert harness.layers.in_flight == 0
    harness.finish(FORWARD)


def test_what_is_written_after_is_possible_beside_the_pass():
    """The side stream does not wait for the pass that waits for it."""
    harness = made()
    admitted(harness, PROMPT)
    harness.forward()
    harness.finish(SIDE)
    assert harness.device.done.index("write 1") < harness.device.done.index("read 0")


def test_without_the_waits_wrong_rows_would_be_read():
    """The fake device is able to show the fault that the waits prevent."""
    harness = made()
    harness.layers.wait_until = lambda layer: None
    admitted(harness, PROMPT)
    harness.forward()
    harness.device.run(FORWARD)
    assert harness.wrong


@pytest.mark.parametrize("name", ["int8", "fast", "dense"])
def test_the_rows_are_those_of_a_restore_before_the_pass(name):
    found = []
    for layers in (True, False):
        harness = made(name)
        if not layers:
            harness.cache.cold.layers = None
        request = admitted(harness, PROMPT)
        assert harness.layers.in_flight == 2 * layers
        harness.forward()
        harness.finish(FORWARD)
        harness.release(request, checkpoint=True)
        found.append(harness.cached_rows())
    for beside, before in zip(*found, strict=True):
        assert torch.equal(beside, before)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pass_that_asks_for_few_layers_is_caught_up_with(order):
    harness = made()
    request = admitted(harness, PROMPT)
    harness.forward(asked=0)  # as a batch whose attention does not read, or a graph that was recorded
    assert harness.layers.in_flight == 2
    harness.device.run(order)
    harness.wrong.clear()
    request.output_ids.append(5)
    request.refresh_fill_ids()
    harness.compute(request, len(PROMPT) + 1)
    harness.forward()
    assert harness.layers.in_flight == 0
    harness.finish(order)


def test_a_batch_that_keeps_its_number_does_not_wait_again():
    harness = made()
    admitted(harness, PROMPT)
    index = harness.layers.ready()
    for _ in range(2):
        harness.layers.set_consumer(index)
    assert (harness.layers.consumer_index, harness.layers.in_flight) == (-1, 0)
    harness.layers.wait_until(LAYERS - 1)


def test_a_graph_that_waits_for_the_last_layer_waits_for_all():
    harness = made()
    admitted(harness, PROMPT)
    with harness.device.on(FORWARD, behind=SCHEDULE):
        harness.layers.set_consumer(harness.layers.ready())
        assert harness.layers.consumer_index >= 0
        harness.layers.wait_until(harness.layers.num_layers - 1)
        harness.device.launch(lambda: None, "graph")
    harness.device.run(FORWARD)
    assert harness.device.done[-1] == "graph"


# -- several ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_several_restores_of_one_batch(order):
    harness = LayerHarness()
    harness.blocks.lossless = True
    harness.cold(SHORT, BESIDE)
    for prompt in (SHORT, BESIDE):
        admitted(harness, prompt)
    assert harness.cache.stats.restores == 2
    assert harness.layers.in_flight == 2
    harness.forward()
    harness.finish(order)


@pytest.mark.parametrize("order", ORDERS)
def test_restores_of_batches_that_follow_each_other(order):
    harness = LayerHarness()
    harness.blocks.lossless = True
    harness.cold(SHORT, BESIDE)
    for prompt in (SHORT, BESIDE, SHORT):  # the third finds hot what the first had restored
        admitted(harness, prompt)
        harness.forward()
    assert harness.cache.stats.restores == 2
    harness.finish(order)


# -- slots that go to others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("passes", [0, 1])
def test_slots_of_a_restore_that_nobody_waited_for(order, passes):
    """A request that is restored and not admitted: the next pass takes it over, or eviction finishes it."""
    harness = made()
    harness.promise(PROMPT)
    for _ in range(passes):
        harness.forward()  # of a batch without number: what decodes meanwhile
    harness.evict(SLOTS)
    assert harness.layers.in_flight == 0
    admitted(harness, OTHER)
    harness.forward()
    harness.finish(order)


@pytest.mark.parametrize("order", ORDERS)
def test_slots_of_a_pass_in_flight(order):
    """A pass still writes rows, of requests that have ended since, to slots that a restore is given."""
    harness = made()
    with harness.device.on(FORWARD):
        for buffer in harness.buffers(harness.blocks.pool):
            harness.device.launch(lambda rows=buffer: rows.fill_(7.0))
    admitted(harness, PROMPT)
    harness.forward()
    harness.finish(order)


@pytest.mark.parametrize("order", ORDERS)
def test_slots_of_an_aborted_request(order):
    harness = made()
    request = admitted(harness, PROMPT)
    harness.batch.clear()
    harness.release(request, checkpoint=False)
    harness.check()
    harness.evict(SLOTS)
    admitted(harness, OTHER)
    harness.forward()
    harness.finish(order)


@pytest.mark.parametrize("order", ORDERS)
def test_another_request_takes_over_what_an_aborted_one_restored(order):
    harness = made()
    request = admitted(harness, PROMPT)
    harness.batch.clear()
    harness.release(request, checkpoint=False)
    admitted(harness, PROMPT)
    assert harness.cache.stats.restores == 1
    harness.forward()
    harness.finish(order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("given", [False, True])
def test_a_flush_while_restores_are_in_flight(order, given):
    harness = made()
    harness.promise(PROMPT)
    if given:
        assert harness.layers.ready() == 0
    harness.flush()
    assert (harness.layers.in_flight, harness.layers.consumer_index) == (0, -1)
    admitted(harness, OTHER)
    harness.forward()
    harness.finish(order)
    assert "write 1" not in harness.device.handed


def test_every_part_of_a_split_node_is_known():
    harness = made()
    harness.promise(PROMPT)
    (last, start), *_ = harness.layers._pending.paths
    upper = harness.cache.trie.split(last, 10)
    assert harness.layers._pending.holds(upper)
    assert harness.layers._pending.holds(last)
    assert start == 0
    assert not harness.layers._pending.holds(harness.cache.trie.root)
    harness.layers.settle(harness.cache.trie.root)
    assert harness.layers.in_flight == 2
    harness.layers.settle(upper)
    assert harness.layers.in_flight == 0
    assert harness.layers.ready() == -1


# -- failure ----------------------------------------------------------------------------------------------------------


def damage_a_block(harness: LayerHarness) -> None:
    block = [view.block for node in harness.cache.trie.nodes() for view in node.views][-1]
    data = np.array(block.data)
    data[-1] ^= 1
    block.data = data


def no_memory_for_the_first_layer(harness: LayerHarness) -> None:
    harness.failing = {0}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", [damage_a_block, no_memory_for_the_first_layer])
def test_a_restore_fails_as_a_whole_before_anything_is_promised(fault, order):
    harness = made()
    fault(harness)
    harness.promise(PROMPT)
    check_nothing_is_left(harness, order)


@pytest.mark.parametrize("order", ORDERS)
def test_another_rank_that_fails_fails_all(order):
    harness = made()
    harness.cache.cold._agree_min = lambda value: 0
    harness.promise(PROMPT)
    check_nothing_is_left(harness, order)


def check_nothing_is_left(harness: LayerHarness, order: str | int) -> None:
    """Of a restore that failed: the slots that it had begun to write go to another request."""
    assert harness.cache.stats.restore_failures == 1
    assert harness.device.handed.count("write 0") < 3
    assert harness.layers.ready() == -1
    harness.failing = set()
    admitted(harness, OTHER)
    harness.forward()
    harness.finish(order)


def test_no_memory_for_a_later_layer_ends_the_pass():
    harness = made()
    admitted(harness, PROMPT)
    harness.failing = {1}
    with pytest.raises(RuntimeError, match=r"layer 1 of a restore .* MemoryError: none for layer 1; start without"):
        harness.forward()
    assert "read 1" not in harness.device.handed
    harness.device.run(FORWARD)
    assert not harness.wrong


def test_nothing_is_asked_of_the_device_while_nothing_is_restored():
    device = FakeDevice()
    layers = LayerRestores(2, lambda: None, device)
    assert layers.ready() == -1
    layers.set_consumer(-1)
    layers.wait_until(0)
    layers.cancel()
    assert not any(device._queues.values())
