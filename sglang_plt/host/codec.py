"""One codec over one server's KV pool, in the terms of the cold tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.version import __version__ as sglang_version

from sglang_plt.calibration.learn import SelfCalibration
from sglang_plt.codec import (
    PROFILED,
    Codec,
    Profile,
    ProfileError,
    Reference,
    Stretch,
    TokenEmbedding,
    as_tokens,
    make_codec,
)
from sglang_plt.codec.base import exact_rows
from sglang_plt.codec.block import HEADER_BYTES, BlockHeader, begin_block, block_limit, encode_block, fingerprint
from sglang_plt.codec.layers import LayerWriter
from sglang_plt.codec.rows import layer_rows
from sglang_plt.host.embedding import find_embedding
from sglang_plt.host.pool import pool_rows
from sglang_plt.host.profiles import locate_profile, profile_info
from sglang_plt.host.rotary import find_rotary

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

FALLBACK = "int8"
"""Stores rows until there is a profile."""


class PoolCodec:
    """Implements :class:`sglang_plt.cache.row_codec.RowCodec` for the pool of ``context``'s model.

    A codec that needs a profile takes the one on disk; without it, blocks are stored as ``int8`` while one is learned
    from their rows (:class:`SelfCalibration`), then it takes over. Blocks say what they are, so old ones stay good.

    Args:
        profile: file or directory to look for a profile in; None is the default directory.
        predicts: whether a layer is to be predicted from the one below.
        agree_min: smallest of an integer over all ranks.
        triton: take Triton kernels, where the pool is on a GPU.

    Raises:
        UnsupportedPool: the pool is not one that a codec can read.
        ProfileError: there is a profile, but not of this model.
        ValueError: the codec does not take the pool's dtype or shape.
    """

    def __init__(
        self,
        name: str,
        pool: KVCache,
        context: TreeCacheBuildContext,
        profile: str | None = None,
        predicts: bool = True,
        agree_min: Callable[[int], int] = lambda value: value,
        triton: bool = False,
    ):
        self._rows = pool_rows(pool)
        layout = self._rows.layout
        model = context.tp_worker.model_runner.model
        self._rotary = None if name == "raw" else find_rotary(model, layout.head_dim, layout.dtype)
        self._name = name
        self._triton = triton and _has_triton(self._rows.device)
        self._embedding: TokenEmbedding | None = None
        if name in PROFILED:
            vocabulary = context.model_config.vocab_size
            self._embedding = find_embedding(model, vocabulary, context.tp_size, self._rows.device)
        self._learning: SelfCalibration[Codec] | None = None
        self._codecs: dict[tuple[str, int], Codec] = {}
        self._current = self._first(context, profile, predicts, agree_min)
        self._current.warm_up()
        self._codecs[self._current.name, self._current.profile_id] = self._current
        self._device = self._rows.device
        self._forward_stream = getattr(context.tp_worker.model_runner, "forward_stream", None)
        self._fingerprint = fingerprint(
            sglang_version,
            context.model_config.model_path,
            context.model_config.hf_config.to_json_string(),
            str(layout),
            context.tp_size,
            context.tp_rank,
        )
        self.lossless = name == "raw"
        self.pool_bytes = layout.row_bytes * pool.size
        self.num_layers = layout.num_layers

    def _first(
        self, context: TreeCacheBuildContext, where: str | None, predicts: bool, agree_min: Callable[[int], int]
    ) -> Codec:
        """What stores the first blocks."""
        if self._name not in PROFILED:
            return make_codec(self._name, self._rows, self._rotary, triton=self._triton)
        layout, name = self._rows.layout, self._name.removesuffix("-tight")
        hidden = 0 if self._embedding is None else self._embedding.hidden
        info = profile_info(name, layout, self._rotary is None, predicts, hidden, context)
        found: Profile | None = None
        refusal: ProfileError | None = None
        try:
            found = locate_profile(info, layout, Path(where) if where is not None else None)
        except ProfileError as error:
            refusal = error
        # a rank that stops alone would leave the others waiting, one without a profile would learn alone
        agreed = agree_min(-1 if refusal is not None else int(found is not None))
        if agreed < 0:
            raise refusal or ProfileError("another rank refused its profile; its log says why")
        if agreed:
            assert found is not None
            return self._make(found)
        fallback = make_codec(FALLBACK, self._rows, self._rotary, triton=self._triton)
        try:
            self._learning = SelfCalibration(info, self._prepare)
        except ValueError as error:
            logger.warning(
                "PLT cache: no profile for codec %s, and none is learned (%s): blocks are stored as %s; make one with "
                "sglang-plt calibrate",
                self._name,
                error,
                FALLBACK,
            )
        return fallback

    def _make(self, profile: Profile) -> Codec:
        return make_codec(self._name, self._rows, self._rotary, profile, self._embedding, self._triton)

    def _prepare(self, profile: Profile) -> Codec:
        """A learned codec, ready to be used; on the thread that learns."""
        codec = self._make(profile)
        codec.warm_up()
        return codec

    def describe(self) -> str:
        """Name, how keys are stored, and where the profile stands."""
        codec = self._current
        keys = "rotated keys" if codec.stores_rotated_keys else "keys without RoPE"
        text = f"{codec.name}/{codec.version} ({keys}" + ", by Triton kernels" * self._triton
        if codec.profile_id:
            text += f", profile {codec.profile_id:016x}"
        if self._learning is not None:
            text += f"; {self._name} after {self._learning.rows_wanted} tokens"
        return text + ")"

    @property
    def fixed_size(self) -> bool:
        """True when :meth:`num_bytes` is exact."""
        return self._current.fixed_size

    def num_bytes(self, num_rows: int, position: int) -> int:
        """Most bytes of a block, a function of integers alone."""
        return block_limit(self._current, num_rows, exact_rows(position, num_rows))

    @property
    def takes_references(self) -> bool:
        """True when rows can be coded as differences from those of other blocks."""
        return self._current.takes_references

    @property
    def takes_tokens(self) -> bool:
        """True when rows are, or will be, predicted from their tokens."""
        return self._embedding is not None

    def encode(
        self,
        slots: torch.Tensor,
        position: int,
        teaches: bool = False,
        references: Sequence[tuple[np.ndarray, Iterable[tuple[int, int, int]]]] = (),
        tokens: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Encode rows; with ``teaches`` their second moments may go into a profile.

        Args:
            references: encoded blocks, each with ``(row of it, row, rows)`` that resemble each other.
            tokens: ids of the rows.
        """
        ids = None if tokens is None else as_tokens(tokens)
        self._after_forward_pass()
        learning = self._learning
        if teaches and learning is not None and learning.wants_rows:
            try:
                self._teach(learning, slots, position, ids)
            except Exception as error:  # what is learned must not cost the block
                logger.warning("PLT cache: nothing is learned from a block: %s: %s", type(error).__name__, error)
        near = [Reference(block, tuple(Stretch(*stretch) for stretch in found)) for block, found in references]
        return encode_block(self._current, self._fingerprint, slots, position, near, ids)

    def _teach(
        self, learning: SelfCalibration[Codec], slots: torch.Tensor, position: int, ids: np.ndarray | None
    ) -> None:
        """Offer a copy of the rows of every layer that a profile would code."""
        features: torch.Tensor | None = None
        kept = exact_rows(position, len(slots))
        if learning.info.hidden:
            if ids is None:
                return
            assert self._embedding is not None
            features = self._embedding(ids[kept:])
        if self._rotary is not None:
            self._rotary.check_positions(position, len(slots))
        learning.offer(layer_rows(self._rows, self._rotary, slots[kept:].to(self._device), position + kept), features)

    def decode(
        self,
        data: np.ndarray,
        start: int,
        stop: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[np.ndarray] = (),
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Rebuild rows of a block; takes and raises what :meth:`begin` does."""
        self.begin(data, start, stop, slots, position, references, tokens).write_all()

    def begin(
        self,
        data: np.ndarray,
        start: int,
        stop: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[np.ndarray] = (),
        tokens: Sequence[int] | None = None,
    ) -> LayerWriter:
        """Check a block of any codec that was in use, given the blocks and the tokens that it was encoded with.

        Raises:
            BlockDamaged: it cannot be rebuilt; nothing was written.
        """
        self._after_forward_pass()
        codec = self._current
        if len(data) >= HEADER_BYTES:
            header = BlockHeader.unpack(data)
            name = header.codec.rstrip(b"\0").decode("ascii", "replace")
            codec = self._codecs.get((name, header.profile), codec)
        ids = None if tokens is None else as_tokens(tokens)
        return begin_block(codec, self._fingerprint, data, start, stop, slots, position, references, ids)

    def advance(self, agree_min: Callable[[int], int]) -> bool:
        """Take the learned profile into use once every rank has its own; every rank must call it at the same step."""
        learning = self._learning
        if learning is None or not agree_min(int(learning.done)):
            return False
        self._learning = None
        codec = learning.result
        if not agree_min(int(codec is not None)):
            return False
        assert codec is not None
        self._codecs[codec.name, codec.profile_id] = codec
        self._current = codec
        logger.info("PLT cache: learned a profile, new blocks are stored as %s", self.describe())
        return True

    def _after_forward_pass(self) -> None:
        """Order our stream behind the forward pass in flight.

        With overlap scheduling a step may still write rows that are about to be read, and one stray row of a request
        that has just finished, into a slot that a restore has been given since.
        """
        if self._device.type == "cuda" and self._forward_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._forward_stream)


def _has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; a CPU has them in the interpreter only, which is for tests."""
    import triton

    if device.type == "cuda" or triton.knobs.runtime.interpret:
        return True
    logger.warning("PLT cache: --plt-triton=on has no use on %s: its own kernels are taken", device.type)
    return False
