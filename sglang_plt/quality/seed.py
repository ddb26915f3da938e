"""The seed table of arXiv 2604.15356 from measured rates: what long prompts take to keep, and to get back.

Nothing of the model in the table is measured. Sizes of plain numbers are arithmetic; all else is projected from the
rates of the model that was measured, and from two assumptions: a link, and a rate of computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_plt.codec import EXACT_TOKENS
from sglang_plt.quality.bits import SURPRISAL, TOKEN_IDS
from sglang_plt.quality.geometry import MODELS, decode_flops
from sglang_plt.results import Row

MODEL = "llama-3.1-70b"
TOKENS = (8192, 16384, 32768, 65536, 131072)
QUANTISED = "3bit"
_FLOAT, _QUANTISED = 16, 3  # bits
_MEASURED, _ARITHMETIC, _PROJECTED = "m", "=", "p"
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_TRANSFORMS = ("fast", "dense")  # and their variants
_LEGEND = """m  measured on this model, as above: bits a token, or a value (but for four tokens, which stay at 16)
=  arithmetic: 16 bits a value, 3 as the quantiser of arXiv 2604.15356 without side information, whole bits of an id
p  projected, size: m as if it held for that model and for such prompts, which nothing here shows; without profiles
p  projected, seconds: size over an assumed link of {link:g} GB/s (PCIe 5.0 x16 sustains about 50); for fast and dense,
   also the operations of their whole transforms at the rate of a prefill; entropy decoding and unpacking are left out
p  projected, seconds of token-ids and surprisal: replay, that is a prefill with causal attention at an assumed
   {tflops:g} TFLOP/s (400 is 40 % of the dense bf16 peak of an H100 or H200). More for surprisal (>), since tokens
   coded to it are decoded by the model one after another. One GPU and its link; more of both shrinks all seconds"""


@dataclass(frozen=True)
class Cell:
    """One way to keep a prompt.

    Attributes:
        rate: bits a KV number, or bits a token of what is replayed.
        size: bytes.
        seconds: until its KV is on the device again; always projected.
        measured: whether the rate was, on another model; the size is projected then, and arithmetic else.
    """

    rate: float
    size: float
    seconds: float
    measured: bool


def project(
    num_tokens: int, rates: Mapping[str, float], surprisal: float, link_gb_s: float, tflops: float
) -> dict[str, Cell]:
    """Every way to keep a prompt of ``num_tokens`` of :data:`MODEL`.

    Args:
        rates: codec -> bits a KV number behind the first four tokens; those are kept at 16 bits.
        surprisal: bits a token.
        link_gb_s: 10**9 bytes a second from host memory to the device.
        tflops: 10**12 operations a second, of a prefill and of the transforms of ``fast`` and ``dense``.
    """
    model = MODELS[MODEL]
    values, link, rate = model.num_layers * model.width, 1e9 * link_gb_s, 1e12 * tflops
    replay = num_tokens * model.prompt_flops(num_tokens) / rate
    transform = num_tokens * decode_flops(model.profile_info()) / rate

    def moved(bits: float, exact: int = 0, computed: float = 0.0) -> Cell:
        size = values * (bits * (num_tokens - exact) + _FLOAT * exact) / 8
        return Cell(bits, size, size / link + computed, exact > 0)

    def replayed(bits: float, measured: bool) -> Cell:
        return Cell(bits, num_tokens * bits / 8, replay, measured)

    return {
        "fp16": moved(_FLOAT),
        QUANTISED: moved(_QUANTISED),
        **{
            codec: moved(bits, EXACT_TOKENS, transform if codec.startswith(_TRANSFORMS) else 0.0)
            for codec, bits in rates.items()
        },
        TOKEN_IDS: replayed(math.ceil(math.log2(model.vocab)), False),
        SURPRISAL: replayed(surprisal, True),
    }


def seed_cells(measured: Sequence[Row], link_gb_s: float, tflops: float) -> dict[int, dict[str, Cell]]:
    """Tokens of a prompt -> name -> how it is kept; ``raw`` keeps what ``fp16`` does and is left out.

    Args:
        measured: rows of :func:`sglang_plt.quality.bits.rows_of`.
        link_gb_s, tflops: assumed, as at :func:`project`.
    """
    found = {(row.metric, row.arm): row.value for row in measured}
    rates = {
        codec: value
        for (metric, arm), value in found.items()
        if metric == "coded_bits_per_value" and arm.endswith("/all") and (codec := arm.partition("/")[0]) != "raw"
    }
    surprisal = found["surprisal_bits_per_token", f"{SURPRISAL}/all"]
    return {tokens: project(tokens, rates, surprisal, link_gb_s, tflops) for tokens in TOKENS}


def seed_rows(cells: Mapping[int, Mapping[str, Cell]]) -> list[Row]:
    """``seed_bytes`` and ``seed_seconds``, arms ``model/tokens/codec``; ``n`` is 0, as nothing of them was observed."""
    rows = []
    for tokens, ways in cells.items():
        for name, cell in ways.items():
            arm = f"{MODEL}/{tokens}/{name}"
            rows.append(Row("seed_bytes", arm, cell.size, "bytes", n=0))
            rows.append(Row("seed_seconds", arm, cell.seconds, "s", n=0))
    return rows


def seed_table(
    cells: Mapping[int, Mapping[str, Cell]], link_gb_s: float, tflops: float, groups: Mapping[str, int]
) -> str:
    """Rates, bytes and seconds, every cell marked ``m`` for measured, ``=`` for arithmetic or ``p`` for projected.

    Args:
        groups: codec -> layers of a transform of the profile that it was measured with.
    """
    model, names = MODELS[MODEL], list(cells[TOKENS[0]])
    shape = f"{model.num_layers} layers, {model.kv_heads} KV heads of {model.head_dim}"
    lines = [f"{MODEL} ({shape}), which was not run: its sizes and times are projected or arithmetic, never measured"]

    def line(label: str, texts: Iterable[str]) -> None:
        lines.append(f"{label:16}" + "".join(f"{text:>14}" for text in texts))

    line("kept as", ("3 bits" if name == QUANTISED else name for name in names))
    line("bits", (_rate(name, cell) for name, cell in cells[TOKENS[0]].items()))
    for tokens, ways in cells.items():
        marked = (f"{_size(cell.size)} {_PROJECTED if cell.measured else _ARITHMETIC}" for cell in ways.values())
        line(f"{tokens} tokens", marked)
    for tokens, ways in cells.items():
        marked = (f"{'>' * (name == SURPRISAL)}{cell.seconds:.3g} s {_PROJECTED}" for name, cell in ways.items())
        line(f"{tokens} tokens", marked)
    for codec, group in groups.items():
        if group > 1:
            lines.append(
                f"{codec} was measured with transforms of {group} layers; a model that wide has one for each layer, "
                "which takes more bits"
            )
    return "\n".join((*lines, _LEGEND.format(link=link_gb_s, tflops=tflops)))


def _rate(name: str, cell: Cell) -> str:
    unit = "/token" if name in (TOKEN_IDS, SURPRISAL) else "/value"
    return f"{cell.rate:.2f}{unit} {_MEASURED}" if cell.measured else f"{cell.rate:g}{unit} {_ARITHMETIC}"


def _size(num_bytes: float) -> str:
    factor, unit = next(pair for pair in _UNITS if num_bytes >= pair[0] or pair[0] == 1)
    return f"{num_bytes / factor:.3g} {unit}"
