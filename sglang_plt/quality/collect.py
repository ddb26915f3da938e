"""Runs a model over text and gathers what a profile is fitted from; can be stopped and taken up again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_plt.calibration.moments import Moments
from sglang_plt.calibration.sensitivity import Fisher
from sglang_plt.codec import EXACT_TOKENS, Rotary, RowLayout
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import Window

CONTINUATION = 256
"""Tokens behind a window's prefix whose distributions the sensitivities are measured on."""


class Collection:
    """Moments of all windows, sensitivities of those at the front; ``done`` windows are in.

    Args:
        key: says what is collected; a state file of another key is not taken up.
        hidden, token_layers: of the moments.
    """

    def __init__(self, layout: RowLayout, group: int, key: str, hidden: int = 0, token_layers: int = 0) -> None:
        key_width, value_width = layout.kv_heads * layout.head_dim, layout.kv_heads * layout.v_head_dim
        self.key = key
        self.done = 0
        self.moments = Moments(layout.num_layers, key_width + value_width, group, hidden, token_layers)
        self.fisher = Fisher(layout.num_layers, key_width, value_width)
        self._key_width = key_width

    def add(self, model: ReferenceModel, rotary: Rotary | None, window: Window, sensitivity: bool, seed: int) -> None:
        """Take in one window; with ``sensitivity`` its last tokens are the continuation, the rest is the prefix."""
        cut = len(window.ids) - CONTINUATION if sensitivity else len(window.ids)
        rows = model.prefill(window.ids[:cut])
        features = model.embedding(rows.tokens[EXACT_TOKENS:]) if self.moments.hidden else None
        self.moments.add([layer[EXACT_TOKENS:] for layer in rows.layers(rotary)], features)
        if sensitivity:
            generator = torch.Generator().manual_seed(seed)
            gradient = model.gradients(rows, window.ids[cut:], generator)
            layers = _undone(gradient, rotary)
            self.fisher.add(
                [layer[EXACT_TOKENS:, : self._key_width] for layer in layers],
                [layer[EXACT_TOKENS:, self._key_width :] for layer in layers],
                CONTINUATION,
            )
        self.done += 1

    def save(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        tensors = {f"moments.{unit}": sums for unit, sums in enumerate(self.moments.sums)}
        tensors |= {"fisher.keys": self.fisher.keys, "fisher.values": self.fisher.values}
        counts = {"done": self.done, "rows": self.moments.count, "tokens": self.fisher.tokens, "key": self.key}
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, partial, metadata={"collection": json.dumps(counts)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def resume(self, path: Path) -> bool:
        """Take up the state in ``path``; False, and nothing changed, where there is none of this key."""
        try:
            with safe_open(path, framework="pt") as file:
                counts = json.loads((file.metadata() or {})["collection"])
                if counts["key"] != self.key:
                    return False
                sums = [file.get_tensor(f"moments.{unit}") for unit in range(len(self.moments.sums))]
                keys, values = file.get_tensor("fisher.keys"), file.get_tensor("fisher.values")
        except (OSError, SafetensorError, KeyError, ValueError):
            return False
        self.moments.sums, self.moments.count = sums, counts["rows"]
        self.fisher.keys, self.fisher.values, self.fisher.tokens = keys, values, counts["tokens"]
        self.done = counts["done"]
        return True


def collect(
    model: ReferenceModel,
    windows: Sequence[Window],
    sensitivity_windows: int,
    collection: Collection,
    state: Path,
    on_window: Callable[[int], None] = lambda done: None,
    save_every: int = 16,
) -> None:
    """Add the ``windows`` that are missing to ``collection``; the first ones give sensitivities too.

    Args:
        state: file that the collection is kept in meanwhile; removed by the caller.
    """
    rotary = model.rotary(max(len(window.ids) for window in windows))
    for index in range(collection.done, len(windows)):
        collection.add(model, rotary, windows[index], index < sensitivity_windows, seed=index)
        if collection.done % save_every == 0:
            collection.save(state)
        on_window(collection.done)


def _undone(gradient: Rows, rotary: Rotary | None) -> list[torch.Tensor]:
    """The gradient by keys without rotation: the transpose of a rotation is its inverse, times a squared magnitude."""
    layers = gradient.layers(rotary)
    if rotary is not None:
        cos, sin = rotary.cos_sin[: len(gradient)].chunk(2, dim=1)
        magnitude = float((cos * cos + sin * sin).mean())
        if abs(magnitude - 1) > 1e-3:
            width = gradient.keys[0].flatten(1).shape[1]
            for layer in layers:
                layer[:, :width] *= magnitude
    return layers
