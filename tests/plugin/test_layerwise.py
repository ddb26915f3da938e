"""Layer-wise restore on SGLang's own pool, batch and worker classes; what else they do is left out."""

from __future__ import annotations

import logging
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_plt.cache.layer_restores import LayerRestores
from sglang_plt.config import ConfigError
from sglang_plt.plugin import layerwise
from sglang_plt.plugin.seams import Seam, SeamError
from tests.cache.fake_device import FakeDevice


def make_pool() -> MHATokenToKVPool:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    return MHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=2,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )


def context(pool: Any, *, pdmux: bool = False, generation: bool = True) -> Any:
    return SimpleNamespace(
        server_args=SimpleNamespace(enable_pdmux=pdmux),
        model_config=SimpleNamespace(is_generation=generation),
        params=SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool)),
        tp_worker=object.__new__(TpModelWorker),
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    """``(layers, cold tier, pool, worker)``, with the hook in place on a batch that does nothing."""
    monkeypatch.setattr(ScheduleBatch, "prepare_for_extend", lambda self: "prepared")
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    layers, cold = LayerRestores(3, lambda: None, FakeDevice()), SimpleNamespace(layers=None)
    pool, worker = make_pool(), object.__new__(TpModelWorker)
    for _ in range(2):  # a second cache of the process does not hook twice
        layerwise.register(layers, cold, pool, worker)
    assert len(HookRegistry._hooks[layerwise.HOOK]) == 1
    return layers, cold, pool, worker


def batch_of(cache: Any) -> ScheduleBatch:
    batch = object.__new__(ScheduleBatch)
    batch.tree_cache = cache
    return batch


def test_a_batch_gets_its_number_and_the_worker_passes_it_on(registered, monkeypatch):
    layers, cold, _, worker = registered
    numbers = iter((-1, 4))
    monkeypatch.setattr(layers, "ready", lambda: next(numbers))
    noted = []
    monkeypatch.setattr(layers, "set_consumer", noted.append)
    for _ in range(2):
        batch = batch_of(SimpleNamespace(cold=cold))
        assert batch.prepare_for_extend() == "prepared"
        worker.set_hicache_consumer(batch.hicache_consumer_index)
    assert noted == [-1, 4]


def test_batches_of_other_caches_keep_theirs(registered):
    for cache in (None, SimpleNamespace(), SimpleNamespace(cold=SimpleNamespace(layers=None))):
        batch = batch_of(cache)
        batch.hicache_consumer_index = 7
        batch.prepare_for_extend()
        assert batch.hicache_consumer_index == 7


def test_the_pool_asks_before_it_hands_a_layer_out(registered, monkeypatch):
    layers, _, pool, _ = registered
    asked = []
    monkeypatch.setattr(layers, "wait_until", asked.append)
    for layer in range(3):
        pool.get_kv_buffer(layer)
    assert asked == [0, 0, 1, 1, 2, 2]


def test_the_counter_has_what_sglang_reads_of_one(registered):
    """As the runner of recorded prefill graphs does."""
    layers, _, pool, _ = registered
    counter = pool.layer_transfer_counter
    assert counter is layers
    assert (counter.consumer_index, counter.num_layers) == (-1, 3)


def test_a_cpu_restores_before_the_pass_and_says_so(caplog: pytest.LogCaptureFixture):
    pool, cold = make_pool(), SimpleNamespace(layers=None)
    with caplog.at_level(logging.WARNING):
        layerwise.add(cold, SimpleNamespace(), context(pool))
    assert cold.layers is None
    assert pool.layer_transfer_counter is None
    assert [record.message for record in caplog.records] == [
        "PLT cache: --plt-layerwise-restore=on has no use on cpu: restores are done before the forward pass"
    ]


@pytest.mark.parametrize(
    ("kwargs", "match"), [({"pdmux": True}, "--enable-pdmux"), ({"generation": False}, "embedding models")]
)
def test_passes_that_do_not_say_which_batch_they_run_are_refused(kwargs, match):
    with pytest.raises(ConfigError, match=rf"--plt-layerwise-restore=on .*{match}; switch"):
        layerwise.add(SimpleNamespace(), SimpleNamespace(), context(make_pool(), **kwargs))


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layerwise, "SEAMS", (Seam("sglang.gone"),))
    with pytest.raises(SeamError, match=r"sglang\.gone is missing"):
        layerwise.register(LayerRestores(3, lambda: None, FakeDevice()), SimpleNamespace(), make_pool(), object())
