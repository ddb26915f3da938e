"""The arms of :mod:`bench_serving.restore`: encoded blocks and plain copies over a pool as SGLang makes it; prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_plt.codec import BLOCK_TOKENS, PoolRows, Rotary, RowLayout, decode_block, encode_block, make_codec
from sglang_plt.config import CODECS
from sglang_plt.host.pool import pool_rows
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.serving import ServerProcess

_FINGERPRINT = 1
_WARM_UP_TOKENS = 64
# a wrong row is off by its own size; these are several times what the codecs lose on a real model
_WORST_ERROR = {"raw": 0.0, "int8": 0.02, "int4": 0.3}
MEMCPY = ("memcpy", "memcpy_torch")
"""A host copy of the same bytes into the same slots: row by row in a compiled loop, and with ``index_copy_``."""
CONTIGUOUS = "contiguous"
"""One copy of the same bytes from buffer to buffer, which spares itself the slots: a bound, not an alternative."""


def make_pool(layout: RowLayout, num_slots: int) -> MHATokenToKVPool:
    """An empty KV pool as a server of a model with ``layout`` makes it on a CPU."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    return MHATokenToKVPool(
        size=num_slots,
        page_size=1,
        dtype=layout.dtype,
        head_num=layout.kv_heads,
        head_dim=layout.head_dim,
        v_head_dim=layout.v_head_dim,
        layer_num=layout.num_layers,
        device="cpu",
        enable_memory_saver=False,
    )


def fill(pool: PoolRows, slots: torch.Tensor, rows: Rows) -> None:
    """Write ``rows``, cast to the pool's dtype and repeated as often as it takes, to ``slots``."""
    index = torch.arange(len(slots)) % len(rows)
    for buffers, source in ((pool.keys, rows.keys), (pool.values, rows.values)):
        for buffer, layer in zip(buffers, source, strict=True):
            buffer[slots] = layer[index].to(buffer.dtype)


@dataclass(frozen=True)
class Sequences:
    """Real KV to move: ``rows`` of whole sequences of ``tokens`` tokens each, every one from position 0 on."""

    rows: Rows
    tokens: int
    rotary: Rotary | None

    def __post_init__(self) -> None:
        if self.tokens % BLOCK_TOKENS or len(self.rows) % self.tokens:
            raise ValueError(f"need whole sequences of a multiple of {BLOCK_TOKENS} tokens, got {self.tokens}")


class Mover:
    """Restores and encodes the same rows in every way, in one pool whose slots are scattered.

    Args:
        dtype: of the pool.

    Raises:
        RuntimeError: an arm does not bring the rows back; no time is worth reading then.
    """

    def __init__(self, sequences: Sequences, dtype: torch.dtype):
        rows, num_rows = sequences.rows, len(sequences.rows)
        self.num_rows = num_rows
        slots = torch.randperm(2 * num_rows, generator=torch.Generator().manual_seed(0)) + 1  # slot 0 is padding
        self._source, self._target = slots[:num_rows], slots[num_rows:]
        self._starts = range(0, num_rows, BLOCK_TOKENS)
        self._positions = [start % sequences.tokens for start in self._starts]
        self._pool = pool_rows(make_pool(replace(rows.layout, dtype=dtype), 2 * num_rows))
        fill(self._pool, self._source, rows)
        self._codecs = {
            name: make_codec(name, self._pool, None if name == "raw" else sequences.rotary) for name in CODECS
        }
        self._blocks = {name: self.encode(name) for name in CODECS}
        self._host = self._copy_out()
        self._elsewhere = np.zeros_like(self._host)
        for arm in (*CODECS, *MEMCPY):
            self._check(arm)

    def encode(self, codec: str) -> list[np.ndarray]:
        """Encode all rows."""
        return [
            encode_block(self._codecs[codec], _FINGERPRINT, self._source[start : start + BLOCK_TOKENS], position)
            for start, position in zip(self._starts, self._positions, strict=True)
        ]

    def restore(self, arm: str) -> None:
        """Bring all rows to the target slots by a codec or a way of :data:`MEMCPY`; :data:`CONTIGUOUS` spares them."""
        if arm == CONTIGUOUS:
            np.copyto(self._elsewhere, self._host)
            return
        for index, (start, position) in enumerate(zip(self._starts, self._positions, strict=True)):
            slots = self._target[start : start + BLOCK_TOKENS]
            if arm == "memcpy":
                self._codecs["raw"].decode(self._host[index], BLOCK_TOKENS, 0, 0, BLOCK_TOKENS, slots, position)
            elif arm == "memcpy_torch":
                self._copy_with_torch(self._host[index], slots)
            else:
                block = self._blocks[arm][index]
                decode_block(self._codecs[arm], _FINGERPRINT, block, 0, BLOCK_TOKENS, slots, position)

    def _copy_out(self) -> np.ndarray:
        """Host buffers of 256 rows, ``[blocks, bytes]``: per layer the key rows, then the value rows."""
        out = []
        for start in self._starts:
            slots = self._source[start : start + BLOCK_TOKENS]
            parts = [
                buffer[slots].flatten().view(torch.uint8)
                for pair in zip(self._pool.keys, self._pool.values, strict=True)
                for buffer in pair
            ]
            out.append(torch.cat(parts).numpy())
        return np.stack(out)

    def _copy_with_torch(self, host: np.ndarray, slots: torch.Tensor) -> None:
        source, at = torch.from_numpy(host), 0
        for pair in zip(self._pool.keys, self._pool.values, strict=True):
            for buffer in pair:
                flat = buffer.flatten(1)
                stop = at + len(slots) * flat.shape[1] * buffer.itemsize
                flat.index_copy_(0, slots, source[at:stop].view(buffer.dtype).view(len(slots), -1))
                at = stop

    def _check(self, arm: str) -> None:
        buffers = (*self._pool.keys, *self._pool.values)
        for buffer in buffers:
            buffer[self._target] = float("nan")
        self.restore(arm)
        for buffer in buffers:
            want, got = buffer[self._source].float(), buffer[self._target].float()
            error = float((got - want).norm() / want.norm())
            if not error <= _WORST_ERROR.get(arm, 0.0):
                raise RuntimeError(f"{arm} does not restore the rows it was given: relative error {error:.3g}")


class SGLangPrefill(AbstractContextManager["SGLangPrefill"]):
    """Prefill by SGLang: the time of a request that computes a whole prompt and one token.

    Args:
        prompts: token ids, used in turn; the server keeps no prefix.

    Raises:
        ServerStartError: the server does not start.
    """

    def __init__(self, model_path: Path, prompts: Sequence[list[int]]):
        self._prompts = prompts
        longest = max(len(prompt) for prompt in prompts)
        args = ["--model-path", str(model_path), "--max-total-tokens", str(4 * longest), "--max-running-requests", "2"]
        args += ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--random-seed", "0"]
        args += ["--disable-radix-cache", "--sleep-on-idle"]  # the other arms want the cores meanwhile
        self._server = ServerProcess(args)

    def __enter__(self) -> SGLangPrefill:
        self._server.start()
        self._time(self._prompts[0][:_WARM_UP_TOKENS])
        self._time(self._prompts[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()

    def __call__(self, index: int) -> float:
        """Tokens a second of prompt number ``index``."""
        prompt = self._prompts[index % len(self._prompts)]
        return len(prompt) / self._time(prompt)

    def _time(self, prompt: list[int]) -> float:
        payload = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        started = time.perf_counter()
        meta = self._server.post_json("/generate", payload)["meta_info"]
        seconds = time.perf_counter() - started
        if meta["prompt_tokens"] != len(prompt) or meta["cached_tokens"]:
            raise RuntimeError(f"the server computed another prompt than the one it was given: {meta}")
        return seconds


def transformers_prefill(model: ReferenceModel, prompts: Sequence[list[int]], threads: int) -> Callable[[int], float]:
    """Prefill by transformers in this process, on ``threads`` threads: tokens a second of prompt number ``index``."""
    model.prefill(prompts[0][:_WARM_UP_TOKENS])

    def run(index: int) -> float:
        prompt, before = prompts[index % len(prompts)], torch.get_num_threads()
        torch.set_num_threads(threads)
        started = time.perf_counter()
        model.prefill(prompt)
        seconds = time.perf_counter() - started
        torch.set_num_threads(before)
        return len(prompt) / seconds

    return run
