"""What differences cost a prompt that resembles nothing: bits, and time to store its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from time import perf_counter

import numpy as np
import torch

from sglang_plt.blocks import Block
from sglang_plt.cache.near import NearBlocks
from sglang_plt.cache.stats import CacheStats
from sglang_plt.codec import BLOCK_TOKENS, PoolRows, Profile, as_tokens, encode_block
from sglang_plt.codec.predictive import Predictive
from sglang_plt.keys import Key
from sglang_plt.node import Node
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.texts import builtin_windows
from sglang_plt.results import Row

_STORED, _LENGTH = 24, 1024
_FINGERPRINT = 0


def measure_unrelated(model: ReferenceModel, profiles: Mapping[str, Profile], repeats: int = 9) -> list[Row]:
    """Store the blocks of one text beside those of 24 others, with and without a search for what they resemble.

    Args:
        repeats: rounds, in which both are timed, in turn.

    Returns:
        ``bits_vs_alone`` and ``demotion_time_ratio`` of arm ``unrelated``, or ``<codec>/unrelated``.
    """
    windows = builtin_windows(model.tokenizer, _STORED + 1, _LENGTH)
    near, number = NearBlocks(CacheStats()), 0
    for window in windows[1:]:
        for start in range(0, _LENGTH, BLOCK_TOKENS):
            number += 1
            _add(near, number, array("q", window.ids[start : start + BLOCK_TOKENS]), start)
    ids = windows[0].ids
    exact = model.prefill(ids)
    pool = PoolRows(exact.layout, exact.keys, exact.values)
    rows = []
    for name, profile in profiles.items():
        codec = Predictive(pool, model.rotary(_LENGTH), profile, profile.info.scale, model.embedding)
        ratios, bits = [], (0, 0)
        for _ in range(repeats):
            alone, found = _store(codec, ids, None, number), _store(codec, ids, near, number)
            ratios.append(found[0] / alone[0])
            bits = (found[1], alone[1])
        arm = "unrelated" if name == "dense" else f"{name}/unrelated"
        rows.append(Row("bits_vs_alone", arm, bits[0] / bits[1], "ratio", n=len(ids)))
        lo, hi = (float(np.quantile(ratios, share)) for share in (0.1, 0.9))
        rows.append(Row("demotion_time_ratio", arm, float(np.median(ratios)), "ratio", lo, hi, repeats))
    return rows


def _add(near: NearBlocks, number: int, tokens: array, start: int) -> None:
    near.add(Block(number, len(tokens), 0, start), Node(number, None, Key(tokens), start, 0, 0), tokens)


def _store(codec: Predictive, ids: list[int], near: NearBlocks | None, number: int) -> tuple[float, int]:
    """Seconds and bytes of the blocks of ``ids``."""
    total, num_bytes = 0.0, 0
    for start in range(0, len(ids), BLOCK_TOKENS):
        tokens = array("q", ids[start : start + BLOCK_TOKENS])
        slots = torch.arange(start, start + len(tokens))
        number += 1
        started = perf_counter()
        if near is not None:
            assert not near.find(None, tokens), "the texts are not unrelated"
            _add(near, number, tokens, start)
        block = encode_block(codec, _FINGERPRINT, slots, start, tokens=as_tokens(tokens))
        total += perf_counter() - started
        num_bytes += len(block)
        if near is not None:
            near.forget(Block(number, len(tokens), 0, start))
    return total, num_bytes
