"""What a profile and its arithmetic weigh beside models that are too large to be measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from sglang_plt.codec import ProfileInfo, RowLayout
from sglang_plt.quality.components import Used
from sglang_plt.results import Row

PROMPT_TOKENS = 8192
"""Of the prompt whose attention is counted."""
_WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Geometry:
    """A model's sizes.

    Attributes:
        heads: of queries, ``head_dim`` channels each.
        vocab: rows of the embedding, which is not tied to the output.
        parameters: all of them.
    """

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    parameters: int

    @property
    def width(self) -> int:
        """Channels of one layer's row: keys and values."""
        return 2 * self.kv_heads * self.head_dim

    def profile_info(self) -> ProfileInfo:
        """What a profile of such a model is, with this version's defaults."""
        layout = RowLayout(self.num_layers, self.kv_heads, self.head_dim, self.head_dim, torch.bfloat16)
        return ProfileInfo.open("dense", "", layout, keys_rotated=False, sensitivity="fisher", hidden=self.hidden)

    @property
    def prefill_flops(self) -> int:
        """Of one prompt token: two a weight of the layers; attention and output, left out, would add to it."""
        return 2 * (self.parameters - 2 * self.vocab * self.hidden)

    def prompt_flops(self, num_tokens: int) -> float:
        """Of one token of a prompt of ``num_tokens``, the mean: :attr:`prefill_flops` and causal attention.

        Attention is ``4 * num_layers * heads * head_dim * (num_tokens + 1) / 2``: in the mean, a query multiplies with
        the keys of ``(num_tokens + 1) / 2`` tokens, its own included, and its weights with their values; two operations
        a multiplication and addition. What does not skip the masked half takes twice that.
        """
        return self.prefill_flops + 4 * self.num_layers * self.heads * self.head_dim * (num_tokens + 1) / 2


MODELS = {
    "llama-3.1-8b": Geometry(32, 32, 8, 128, 4096, 128256, 8_030_261_248),
    "llama-3.1-70b": Geometry(80, 64, 8, 128, 8192, 128256, 70_553_706_496),
}
"""From ``config.json`` and the safetensors index of ``meta-llama/Llama-3.1-8B`` and ``-70B``."""


def profile_bytes(info: ProfileInfo) -> int:
    """Bytes of all tensors of a profile, as :attr:`sglang_plt.codec.Profile.num_bytes` counts them."""
    total = 0
    for shapes in _shapes(info):
        total += 4 * shapes[-1][1]  # the bias
        total += sum(rows * columns + 4 * (rows + columns) for rows, columns in shapes)
    return total


def decode_flops(info: ProfileInfo, used: float = 1.0) -> float:
    """Of one token, two a multiplication and addition: the prediction and the inverse transform of every unit.

    Args:
        used: share of the transform that is computed; a decoder skips components that are zero throughout a block.
    """
    flops = 0.0
    for (inputs, wide), _ in _shapes(info):
        flops += 2 * inputs * wide + used * 2 * wide * wide
    return flops


def _shapes(info: ProfileInfo) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Of the matrices of every unit: of its prediction and of its inverse transform."""
    for unit in info.units:
        wide = len(unit) * info.width
        yield (info.inputs_of(unit), wide), (wide, wide)


def geometry_rows(used: Mapping[str, Used] = MappingProxyType({})) -> list[Row]:
    """Bytes of a profile over those of the weights, and arithmetic of decoding over that of a prefill.

    Args:
        used: codec -> what its decoder computed of its transform on a model that was measured. Metrics with ``_used``
            take that share for models that were not: they are projections, with arms ``model/codec`` and ``n`` 0.
    """
    rows = []
    for codec, measured in used.items():
        rows.append(Row("components_used", f"{codec}/group{measured.group}", measured.share, "1", n=measured.blocks))
    for name, model in MODELS.items():
        info = model.profile_info()
        share = profile_bytes(info) / (_WEIGHT_BYTES * model.parameters)
        rows.append(Row("profile_share_of_weights", name, share, "1"))
        prompt = model.prompt_flops(PROMPT_TOKENS)
        rows.append(Row(f"prefill_flops_{PROMPT_TOKENS}", name, prompt, "flops/token"))
        arms = {"": 1.0, **{codec: measured.share for codec, measured in used.items()}}
        for codec, part in arms.items():
            flops, arm = decode_flops(info, part), f"{name}/{codec}".rstrip("/")
            metric, observed = "decode_flops_share" + ("_used" if codec else ""), 0 if codec else 1
            rows.append(Row(metric, arm, flops / model.prefill_flops, "1", n=observed))
            rows.append(Row(f"{metric}_{PROMPT_TOKENS}", arm, flops / prompt, "1", n=observed))
    return rows


def geometry_table(rows: list[Row]) -> str:
    """One line a model and share of the transform, and what was measured of that share."""
    found = {(row.metric, row.arm): row for row in rows}
    titles = ("profile, of bf16 weights", "decode flops, of prefill", f"of prefill with attention ({PROMPT_TOKENS})")
    lines = [f"{'one layer a transform':40}" + "".join(f"{title:>34}" for title in titles)]
    codecs = [row for row in rows if row.metric == "components_used"]
    for name in MODELS:
        for codec in ("", *(row.arm.split("/")[0] for row in codecs)):
            arm, metric = f"{name}/{codec}".rstrip("/"), "decode_flops_share" + ("_used" if codec else "")
            profile = found["profile_share_of_weights", name].value
            shares = (profile, found[metric, arm].value, found[f"{metric}_{PROMPT_TOKENS}", arm].value)
            label = f"{name}, {f'{codec} (projected)' if codec else 'all components'}"
            lines.append(f"{label:40}" + "".join(f"{100 * share:>33.2f}%" for share in shares))
    for row in codecs:
        codec, group = row.arm.split("/group")
        lines.append(
            f"projected: {codec} computed {100 * row.value:.1f} % of its inverse transform on the model measured here "
            f"({row.n} blocks, a profile of {group} layer{'s' * (group != '1')} a transform)"
        )
    return "\n".join(lines)
