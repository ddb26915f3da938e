"""FORMAT.md shows payloads of ``fast`` and ``dense`` as they are."""

import re
from pathlib import Path

import pytest
import torch

from sglang_plt.codec import (
    PoolRows,
    Profile,
    ProfileInfo,
    Reference,
    Rotary,
    RowLayout,
    Stretch,
    decode_block,
    encode_block,
    make_codec,
)
from sglang_plt.codec.block import HEADER_BYTES
from sglang_plt.codec.profile import QuantisedMatrix, UnitTransform

FORMAT = (Path(__file__).parents[2] / "FORMAT.md").read_text()
MODEL = 0x0123456789ABCDEF


def example_profile(codec: str, keys_rotated: bool = True) -> Profile:
    info = ProfileInfo(
        codec=codec,
        model="example",
        dtype="float32",
        num_layers=1,
        kv_heads=1,
        head_dim=8,
        v_head_dim=8,
        group=1,
        keys_rotated=keys_rotated,
        step=0.5,
        scale=1.0,
        tokens=2,
        sensitivity="kind",
    )
    nothing = QuantisedMatrix(torch.zeros(0, 16, dtype=torch.int8), torch.zeros(0), torch.ones(16))
    basis = QuantisedMatrix(torch.eye(16, dtype=torch.int8), torch.full((16,), 0.5), torch.ones(16))
    return Profile.make(info, [UnitTransform(nothing, torch.zeros(16), basis)])


def example_rows() -> torch.Tensor:
    row, channel = torch.arange(8.0)[:, None], torch.arange(16.0)
    rows = ((3 * row + 5 * channel) % 8 - 3.5) / 2
    rows[2, 9], rows[5] = 20, 1e6
    return rows


def pool_of(rows: torch.Tensor) -> PoolRows:
    keys, values = (part[:, None].contiguous() for part in rows.split(8, 1))
    return PoolRows(RowLayout(1, 1, 8, 8, torch.float32), (keys,), (values,))


def shown(codec: str, kind: str = "") -> str:
    """The hexadecimal digits of an example."""
    found = ""
    for line in re.split(f"payload of `{codec}`{kind}:\n\n```\n", FORMAT)[1].split("```")[0].splitlines():
        for digits, times in re.findall(r"([0-9a-f]+)(?: \((\d+) times\))?(?=\s|$)", line.split("    ")[0]):
            found += digits * int(times or 1)
    return found


@pytest.mark.parametrize("codec", ["fast", "dense"])
def test_examples_are_real(codec):
    rows, target = example_rows(), pool_of(torch.zeros(8, 16))
    profile, slots = example_profile(codec), torch.arange(8)
    block = encode_block(make_codec(codec, pool_of(rows), None, profile), MODEL, slots, 10)
    assert block[HEADER_BYTES:].tobytes().hex() == shown(codec)
    assert block[64:72].tobytes() == profile.id.to_bytes(8, "little")
    decode_block(make_codec(codec, target, None, profile), MODEL, block, 0, 8, slots, 10)
    got = torch.cat((target.keys[0], target.values[0]), 2)[:, 0]
    assert (got - rows).abs().max() <= 0.5
    assert torch.equal(got[5], rows[5])
    assert (got[2, 9] - 20).abs() <= 0.25


def test_the_example_of_differences_is_real():
    still = Rotary(torch.cat((torch.ones(32, 4), torch.zeros(32, 4)), 1), True, 8)
    rows, profile, slots = example_rows(), example_profile("dense", keys_rotated=False), torch.arange(8)
    reference = encode_block(make_codec("dense", pool_of(rows), still, profile), MODEL, slots, 10)
    assert reference[HEADER_BYTES:].tobytes().hex() == shown("dense")
    changed = torch.cat((rows[1:], rows[:1] + 1))  # its row 4 is the one that the reference has escaped
    changed[0, 3] += 1
    changed[3, 8:] -= 2
    changed[4] = rows[6]
    found = [Reference(reference, (Stretch(1, 0, 7),))]
    block = encode_block(make_codec("dense", pool_of(changed), still, profile), MODEL, slots, 11, found)
    assert block[HEADER_BYTES:].tobytes().hex() == shown("dense", "\nas differences")
    target = pool_of(torch.zeros(8, 16))
    decode_block(make_codec("dense", target, still, profile), MODEL, block, 0, 8, slots, 11, [reference])
    got = torch.cat((target.keys[0], target.values[0]), 2)[:, 0]
    assert (got - changed).abs().max() <= 0.5
