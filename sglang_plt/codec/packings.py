"""The packings by the codecs that have them."""

from __future__ import annotations

from sglang_plt.codec.packing import Entropy, Fixed, Packing
from sglang_plt.codec.rotated import RotatedLloydMax

PACKINGS: dict[str, Packing] = {"fast": Fixed(), "dense": Entropy(), "hadamard": RotatedLloydMax()}
"""Of the codecs that need a profile."""
