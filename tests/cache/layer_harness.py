"""A cache that restores layer by layer on a fake device, and forward passes that read what it gave."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

from sglang_plt.cache.layer_restores import LayerRestores
from sglang_plt.codec import LayerWriter, as_tokens, begin_block
from tests.cache.coded import PROMPT, CodedHarness
from tests.cache.fake_device import FORWARD, SCHEDULE, FakeDevice
from tests.cache.harness import Harness, Request
from tests.codec.correlated import ROTARY, SOURCE
from tests.codec.near import picked

LAYERS = SOURCE.layers

Work = tuple[array, torch.Tensor, int]
"""Tokens of a request so far, their slots, and how many of them have rows already."""


class LayerHarness(CodedHarness):
    """Requests are admitted into a batch; :meth:`forward` runs it, layer by layer, and reads what the cache gave.

    Attributes:
        failing: numbers of layers whose writing raises.
        wrong: rows that a layer read and that were not those of the request, as messages.
    """

    def __init__(self, name: str = "raw"):
        super().__init__(name)
        self.device = FakeDevice()
        self.layers = LayerRestores(LAYERS, self.begin, self.device)
        self.cache.cold.layers = self.layers
        self.encode, self.blocks.encode = self.blocks.encode, self.encode_when_done
        self.failing: set[int] = set()
        self.wrong: list[str] = []
        self.batch: list[Work] = []

    def encode_when_done(self, *args: Any, **kwargs: Any) -> Any:
        self.device.run(least=FORWARD)  # a codec reads behind the forward pass, and the host waits for what it reads
        return self.encode(*args, **kwargs)

    def begin(
        self, data: Any, start: int, stop: int, slots: Any, position: int, references: Any = (), tokens: Any = None
    ) -> LayerWriter:
        ids = None if tokens is None else as_tokens(tokens)
        inner = begin_block(self.blocks.codec, 1, data, start, stop, slots, position, references, ids)

        def write(first: int, stop: int) -> None:
            for layer in range(first, stop):
                if layer in self.failing:
                    raise MemoryError(f"none for layer {layer}")
                self.device.launch(lambda to=layer + 1: inner.write_to(to), f"write {layer}")

        return LayerWriter(LAYERS, write)

    # -- batches --------------------------------------------------------------------------------------------------

    def computed(self, tokens: array) -> Any:
        """Rows of a token do not depend on how many follow, and a little on the first one."""
        rows = [row * (1 + tokens[0] / 10_000) for row in picked(self.of_token, list(tokens))]
        return SOURCE.pool(rows, torch.arange(len(tokens)), ROTARY, 0)

    def compute(self, request: Request, end: int) -> None:
        start = request.kv.kv_allocated_len
        Harness.compute(self, request, end)
        slots = self.rows.req_to_token[request.kv.req_pool_idx, :end].long()
        self.batch.append((request.full_untruncated_fill_ids[:end], slots, start))

    def forward(self, asked: int = LAYERS) -> None:
        """One pass over the batch that asks the pool for its first ``asked`` layers."""
        batch, self.batch = self.batch, []
        index = self.layers.ready() if batch else -1
        with self.device.on(FORWARD, behind=SCHEDULE):
            self.layers.set_consumer(index)
            for layer in range(LAYERS):
                self.device.launch(lambda at=layer: self._store(batch, at), f"store {layer}")
                if layer < asked:
                    self.layers.wait_until(layer)
                self.device.launch(lambda at=layer: self._read(batch, at), f"read {layer}")

    def _store(self, batch: list[Work], layer: int) -> None:
        pool = self.blocks.pool
        for tokens, slots, start in batch:
            computed = self.computed(tokens)
            pool.keys[layer][slots[start:]] = computed.keys[layer][start : len(tokens)]
            pool.values[layer][slots[start:]] = computed.values[layer][start : len(tokens)]

    def _read(self, batch: list[Work], layer: int) -> None:
        pool = self.blocks.pool
        for tokens, slots, start in batch:
            computed = self.computed(tokens)
            for ours, theirs in ((pool.keys, computed.keys), (pool.values, computed.values)):
                read = ours[layer][slots]
                exact = torch.equal(read, theirs[layer][: len(tokens)])
                if not (exact if self.blocks.lossless else bool(read.isfinite().all())):
                    self.wrong.append(f"layer {layer} of {len(tokens)} tokens, {start} of them from the cache")

    # -- what a test does -----------------------------------------------------------------------------------------

    def cold(self, *prompts: array) -> None:
        """Serve prompts and evict them; NaN lies in their slots."""
        for prompt in prompts:
            request = Request("r", array("q", prompt))
            self.admit(request)
            self.forward()
            self.device.run()
            self.release(request, checkpoint=True)
        self.forget_rows()
        self.device.handed.clear()
        self.device.done.clear()

    def promise(self, prompt: array) -> None:
        """Match and restore as the scheduler does for a request that is then not admitted."""
        request = Request("r", array("q", prompt))
        tokens = len(prompt) - 1
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(request, tokens), req=request))
        self.cache.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request))

    def finish(self, prefer: str | int = 0) -> None:
        """Let the device do all that it has, and hold the outcome to what must be."""
        self.device.run(prefer)
        assert not self.wrong
        self.check()


def made(name: str = "raw") -> LayerHarness:
    """A harness whose ``PROMPT`` is cold."""
    harness = LayerHarness(name)
    if name == "raw":
        harness.blocks.lossless = True
    harness.cold(PROMPT)
    assert harness.cache.trie.cold_tokens > 0
    return harness
