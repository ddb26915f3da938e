"""A stream of a GPU beside the scheduler's and the forward pass's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DeviceSideStream:
    """:class:`sglang_plt.cache.layer_restores.SideStream` of a CUDA or ROCm device.

    Args:
        module: has the streams and events; for tests.
    """

    def __init__(self, device: torch.device, module: Any = torch.cuda):
        self._device, self._module = device, module
        self._stream = module.Stream(device)

    @contextmanager
    def started(self) -> Iterator[None]:
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    @contextmanager
    def resumed(self) -> Iterator[None]:
        with self._module.stream(self._stream):
            yield

    def keep(self, slots: torch.Tensor) -> None:
        slots.record_stream(self._stream)

    def record(self) -> Any:
        event = self._module.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        self._module.current_stream(self._device).wait_event(event)
