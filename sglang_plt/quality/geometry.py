"""What a profile and its arithmetic weigh beside models that are too large to be measured here."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_plt.codec.profile import unit_layers
from sglang_plt.results import Row

_WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Geometry:
    """A model's sizes.

    Attributes:
        vocab: rows of the embedding, which is not tied to the output.
        parameters: all of them.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    parameters: int

    @property
    def width(self) -> int:
        """Channels of one layer's row: keys and values."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def prefill_flops(self) -> int:
        """Of one prompt token: two a weight of the layers; attention and output, left out, would add to it."""
        return 2 * (self.parameters - 2 * self.vocab * self.hidden)


MODELS = {
    "llama-3.1-8b": Geometry(32, 8, 128, 4096, 128256, 8_030_261_248),
    "llama-3.1-70b": Geometry(80, 8, 128, 8192, 128256, 70_553_706_496),
}
"""From ``config.json`` and the safetensors index of ``meta-llama/Llama-3.1-8B`` and ``-70B``."""


def profile_bytes(num_layers: int, width: int, group: int) -> int:
    """Bytes of all tensors of a profile, as :attr:`sglang_plt.codec.Profile.num_bytes` counts them."""
    total = 0
    for unit in unit_layers(num_layers, group):
        below, wide = (width if unit.start else 0), width * len(unit)
        predictor, basis = below * wide + 4 * (below + wide), wide * wide + 4 * (wide + wide)
        total += 4 * wide + predictor + basis
    return total


def decode_flops(num_layers: int, width: int, group: int) -> int:
    """Of one token, two a multiplication and addition: the prediction and the inverse transform of every unit."""
    units = unit_layers(num_layers, group)
    return sum(2 * (width * bool(unit.start) + width * len(unit)) * width * len(unit) for unit in units)


def geometry_rows(group: int = 1) -> list[Row]:
    """Bytes of a profile over those of the weights, and arithmetic of decoding over that of a prefill."""
    rows = []
    for name, model in MODELS.items():
        share = profile_bytes(model.num_layers, model.width, group) / (_WEIGHT_BYTES * model.parameters)
        flops = decode_flops(model.num_layers, model.width, group) / model.prefill_flops
        rows += [Row("profile_share_of_weights", name, share, "1"), Row("decode_flops_share", name, flops, "1")]
    return rows


def geometry_table(rows: list[Row]) -> str:
    """One line a model."""
    found = {(row.metric, row.arm): row.value for row in rows}
    lines = [f"{'model, one layer a transform':32}{'profile, of bf16 weights':>26}{'decode flops, of prefill':>26}"]
    for name in MODELS:
        shares = (found[metric, name] for metric in ("profile_share_of_weights", "decode_flops_share"))
        lines.append(f"{name:32}" + "".join(f"{100 * share:>25.2f}%" for share in shares))
    return "\n".join(lines)
