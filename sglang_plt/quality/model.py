"""The reference: a transformers model in float32 whose KV can be taken out, changed and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_plt.codec import Rotary, RowLayout, TokenEmbedding, as_tokens
from sglang_plt.quality import QualityError

_PROBE_POSITIONS = 32
_PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Rows:
    """KV of consecutive tokens: per layer ``keys`` (rotated) ``[tokens, kv_heads, head_dim]`` and ``values``.

    Attributes:
        tokens: int64 ``[tokens]``, their ids; none where they are not known.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.keys[0])

    @property
    def layout(self) -> RowLayout:
        key, value = self.keys[0], self.values[0]
        return RowLayout(len(self.keys), key.shape[1], key.shape[2], value.shape[2], key.dtype)

    def ids(self, tokens: slice) -> np.ndarray | None:
        """The ids of some of the tokens; None where they are not known."""
        return self.tokens[tokens] if len(self.tokens) else None

    def part(self, tokens: slice) -> Rows:
        """The rows of some of the tokens."""
        keys, values = (tuple(buffer[tokens] for buffer in kind) for kind in (self.keys, self.values))
        return Rows(keys, values, self.tokens[tokens])

    def followed_by(self, other: Rows) -> Rows:
        """These rows, then ``other``."""
        pairs = zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True)
        both = [torch.cat(pair) for pair in pairs]
        tokens = np.concatenate((self.tokens, other.tokens))
        return Rows(tuple(both[: len(self.keys)]), tuple(both[len(self.keys) :]), tokens)

    def layers(self, rotary: Rotary | None) -> list[torch.Tensor]:
        """Per layer ``[tokens, width]``: keys, their rotation undone where ``rotary`` is known, then values."""
        positions = torch.arange(len(self))
        keys = self.keys if rotary is None else [rotary.undo(key, positions) for key in self.keys]
        return [torch.cat((k.flatten(1), v.flatten(1)), 1) for k, v in zip(keys, self.values, strict=True)]

    @property
    def num_values(self) -> int:
        """Numbers in all rows."""
        return sum(buffer.numel() for buffer in (*self.keys, *self.values))


class ReferenceModel:
    """A causal language model with full attention, in float32 on the CPU.

    Args:
        path: model directory of transformers; nothing is downloaded.

    Raises:
        QualityError: ``path`` is no such directory, or the model does not keep one row a token in every layer.
    """

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        if not (path / "config.json").is_file():
            raise QualityError(f"--model-path={path} is not a model directory: it has no config.json")
        logging.disable_progress_bar()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
            self._model.requires_grad_(False)
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise QualityError(f"--model-path={path} cannot be loaded by transformers: {reason}") from error
        #: floating-point type that the model was published in, which a server's KV pool takes
        self.dtype = str(getattr(self._model.config, "dtype", None) or "float32").removeprefix("torch.")
        #: what profiles predict the first layers from
        self.embedding = TokenEmbedding(self._model.get_input_embeddings().weight, torch.device("cpu"))
        self.max_positions = int(getattr(self._model.config, "max_position_embeddings", 1 << 30))

    @property
    def layout(self) -> RowLayout:
        """Shape of the model's rows, in float32."""
        return self.prefill([0]).layout

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Rows:
        """The exact KV of ``ids``, which start a sequence."""
        return self._forward(ids, None)

    @torch.inference_mode()
    def continue_from(self, rows: Rows, ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[len(ids), vocabulary]`` after each of ``ids``, teacher-forced behind the prefix ``rows``."""
        return self._continue(rows, ids).logits[0]

    @torch.inference_mode()
    def extend(self, rows: Rows, ids: Sequence[int]) -> Rows:
        """The KV of ``ids`` behind the prefix ``rows``, without the prefix."""
        cache = self._continue(rows, ids, logits_to_keep=1).past_key_values
        return _rows_of(cache, [*[-1] * len(rows), *ids]).part(slice(len(rows), None))

    def gradients(self, rows: Rows, ids: Sequence[int], generator: torch.Generator) -> Rows:
        """Gradient, by ``rows``, of the log-probability of tokens drawn from the model, one after each of ``ids``."""
        keys, values = (tuple(x.clone().requires_grad_() for x in kind) for kind in (rows.keys, rows.values))
        leaves = Rows(keys, values)
        with torch.enable_grad():
            logits = self._continue(leaves, ids).logits[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            total = -torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
            found = torch.autograd.grad(total, [*leaves.keys, *leaves.values])
        return Rows(tuple(found[: len(leaves.keys)]), tuple(found[len(leaves.keys) :]))

    def _continue(self, rows: Rows, ids: Sequence[int], **options: Any) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(rows.keys, rows.values, strict=True)):
            cache.update(keys.transpose(0, 1)[None].contiguous(), values.transpose(0, 1)[None].contiguous(), layer)
        return self._model(torch.tensor([ids]), past_key_values=cache, use_cache=True, **options)

    @torch.inference_mode()
    def rotary(self, num_positions: int) -> Rotary | None:
        """How the model rotates its keys, for positions below ``num_positions``; None where it is not understood.

        The table is the model's own. It is proved on the keys of the first layer, which depend on the token alone once
        the rotation is undone.
        """
        modules = [module for module in self._model.modules() if hasattr(module, "inv_freq")]
        if len(modules) != 1 or num_positions < 2:
            return None
        cos, sin = modules[0](torch.zeros(1), torch.arange(num_positions)[None])
        dim = cos.shape[-1]
        positions = torch.linspace(0, num_positions - 1, min(_PROBE_POSITIONS, num_positions)).long()
        keys = self._forward([min(100, self._model.config.vocab_size - 1)] * len(positions), positions).keys[0]
        if dim % 2 or dim > keys.shape[-1]:
            return None
        for channels in (slice(0, dim // 2), slice(0, dim, 2)):  # every angle stands in the table twice
            table = torch.cat((cos[0, :, channels], sin[0, :, channels]), dim=1).float().contiguous()
            for is_neox in (True, False):
                rotary = Rotary(table, is_neox, dim)
                still = rotary.undo(keys, positions)
                if float((still - still[:1]).abs().max()) <= _PROBE_TOLERANCE * float(still.abs().max()):
                    return rotary
        return None

    def _forward(self, ids: Sequence[int], positions: torch.Tensor | None) -> Rows:
        where = {} if positions is None else {"position_ids": positions[None]}
        output = self._model(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **where)
        return _rows_of(output.past_key_values, ids)


def _rows_of(cache: Any, ids: Sequence[int]) -> Rows:
    """What transformers' cache holds, which must be a row a token in every layer."""
    keys, values = [], []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if key is None or value is None or key.ndim != 4 or key.shape[2] != len(ids):
            raise QualityError(f"layer {number} of the model keeps no row a token: give a model of full attention")
        keys.append(key[0].transpose(0, 1).contiguous())
        values.append(value[0].transpose(0, 1).contiguous())
    if len({key.shape for key in keys}) != 1 or len({value.shape for value in values}) != 1:
        raise QualityError("the layers of the model keep rows of different shapes: give a model whose layers agree")
    return Rows(tuple(keys), tuple(values), as_tokens(ids))
