"""Encoded blocks in host memory: a byte budget, reference counts, and a writer that works ahead of need."""

from sglang_plt.store.block_store import BlockStore
from sglang_plt.store.writer import BlockWriter

__all__ = ["BlockStore", "BlockWriter"]
