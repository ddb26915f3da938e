"""Token ids as numbers that rows of the first layers can be predicted from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from sglang_plt.codec.reference import BlockDamaged

_SAMPLE = 256


class TokenEmbedding:
    """A model's embedding, every row brought to a root mean square of 1 as the first layer's norm does.

    Keys and values of the first layer are an affine function of that, those of the layers behind it nearly.

    Args:
        weight: ``[vocabulary, hidden]``, floating, the model's own; not copied, so it must not change. When it does
            nonetheless, :attr:`changed` is True.
        device: of the features.
    """

    def __init__(self, weight: torch.Tensor, device: torch.device) -> None:
        self.hidden = weight.shape[1]
        self._weight, self._device = weight.detach(), device
        flat = self._weight.reshape(-1)  # a view: the table of a model is contiguous
        self._sample = flat[:: max(1, len(flat) // _SAMPLE)]
        self._was = self._sample.clone()

    @property
    def changed(self) -> bool:
        """True when the weights were overwritten since; a few hundred numbers, spread over all, are compared."""
        return not torch.equal(self._sample, self._was)

    def __call__(self, tokens: np.ndarray) -> torch.Tensor:
        """float32 ``[n, hidden]``; ids outside the vocabulary, as stand for images, give zeros."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        inside = (ids >= 0) & (ids < len(self._weight))
        rows = self._weight[torch.where(inside, ids, 0).to(self._weight.device)].to(self._device).float()
        size = rows.pow(2).mean(1, keepdim=True).sqrt()
        return torch.where(inside.to(self._device)[:, None] & (size > 0), rows / size.clamp_min(1e-30), 0.0)


def token_hash(tokens: np.ndarray) -> int:
    """XXH3-64 of token ids as little-endian int64, which a block carries: other tokens would give other rows."""
    return xxhash.xxh3_64(tokens.astype("<i8").tobytes()).intdigest()


def checked_tokens(
    expected: int | None, embedding: TokenEmbedding | None, tokens: np.ndarray | None
) -> np.ndarray | None:
    """The tokens of a payload's coded rows, where they are predicted from them.

    Args:
        expected: hash of them in the payload; None where they are not.

    Raises:
        BlockDamaged: they are others, or not known, or the embedding has changed.
    """
    if expected is None:
        return None
    if embedding is None or embedding.changed:
        raise BlockDamaged("payload: rows are predicted from a token embedding that is not there any more")
    if tokens is None or token_hash(tokens) != expected:
        raise BlockDamaged(f"payload: its tokens have the hash {expected:#018x}, those given have not")
    return tokens


def as_tokens(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 ``[n]``; memory is shared where it can be."""
    return np.asarray(tokens, np.int64)
