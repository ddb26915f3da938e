"""Finds the embedding of the model that a server runs."""

from __future__ import annotations

import torch
from torch import nn

from sglang_plt.codec import TokenEmbedding


def find_embedding(model: nn.Module, vocabulary: int, tp_size: int, device: torch.device) -> TokenEmbedding | None:
    """What the first layers are predicted from, or None where the model has no whole table of floats.

    Args:
        vocabulary: tokens of the model; its table may have more rows, as padding.
        tp_size: ranks that share the table; one of several holds a part of it.
        device: of the KV pool.
    """
    if tp_size > 1:
        return None
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] in ("embed_tokens", "wte", "word_embeddings") and isinstance(weight, torch.Tensor):
            found.append(weight)
    whole = [w for w in found if w.ndim == 2 and w.is_floating_point() and w.itemsize > 1 and len(w) >= vocabulary]
    return TokenEmbedding(whole[0], device) if len(whole) == len(found) == 1 else None
