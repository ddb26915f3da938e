"""Encodes blocks in a background thread, so that an eviction usually finds them written."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from sglang_plt.blocks import Block, BlockState

logger = logging.getLogger(__name__)


class BlockWriter:
    """One worker thread over a queue of blocks; :meth:`finish` completes a block on the caller's thread.

    Rows are read from the slots that a block names, so their owner must not free those slots before ``finish`` or
    ``cancel`` has returned. What is decided never depends on how far the worker is.

    Args:
        encode: turns a block into its bytes; may raise.
        on_failure: told about every block that could not be encoded, with the exception.
        background: without it every block is encoded by ``finish``.
        prepare: called first by the worker thread.
    """

    def __init__(
        self,
        encode: Callable[[Block], Any],
        on_failure: Callable[[Block, Exception], None],
        background: bool = True,
        prepare: Callable[[], None] = lambda: None,
    ):
        self._encode = encode
        self._on_failure = on_failure
        self._background = background
        self._prepare = prepare
        self._queue: deque[Block] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._working: Block | None = None  # what the worker thread encodes now
        self._thread: threading.Thread | None = None

    def submit(self, blocks: Iterable[Block]) -> None:
        """Encode ``blocks`` some time before :meth:`finish` is called for them."""
        if not self._background:
            return
        with self._changed:
            self._queue.extend(blocks)
            if self._queue and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="plt-block-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, block: Block) -> bool:
        """Return once ``block`` is READY or FAILED; True when it had been written ahead."""
        if block.state in (BlockState.READY, BlockState.FAILED):
            return True
        with self._changed:
            while block.state is BlockState.ENCODING:
                self._changed.wait()
            if block.state is not BlockState.QUEUED:
                return True
            block.state = BlockState.ENCODING
        self._write(block)
        return False

    def abandon(self, block: Block) -> None:
        """Never read the slots of ``block`` again: a block in the queue fails, one in work is waited for."""
        with self._changed:
            if block.state is BlockState.QUEUED:
                block.state = BlockState.FAILED
                block.slots = None
            while block.state is BlockState.ENCODING:
                self._changed.wait()

    def cancel(self) -> None:
        """Forget the queue and wait for the block in work; afterwards no slot is read."""
        with self._changed:
            self._queue.clear()
            while self._working is not None:
                self._changed.wait()

    def drain(self) -> None:
        """Wait until the queue is empty; for tests and benchmarks."""
        with self._changed:
            while self._queue or self._working is not None:
                self._changed.wait()

    def close(self) -> None:
        """Stop the worker; blocks still queued stay as they are."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._prepare()
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                block = self._queue.popleft()
                if block.state is not BlockState.QUEUED or block.refs == 0:
                    self._changed.notify_all()
                    continue
                block.state = BlockState.ENCODING
                self._working = block
            self._write(block)

    def _write(self, block: Block) -> None:
        """Encode a block that is already marked ENCODING by this thread, what it refers to first."""
        data: Any = None
        try:
            for reference in block.references:  # these have none themselves
                self.finish(reference.block)
            data = self._encode(block)
        except Exception as error:
            self._on_failure(block, error)
        with self._changed:
            block.data = data
            block.slots = None
            block.state = BlockState.FAILED if data is None else BlockState.READY
            if self._working is block:
                self._working = None
            self._changed.notify_all()
