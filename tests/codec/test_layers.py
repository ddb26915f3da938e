"""Layers of a block one by one: the bits of a decode in one go, in order, and nothing before all is checked."""

import numpy as np
import pytest
import torch

from sglang_plt.codec import BlockDamaged, LayerWriter, PoolRows, begin_block, decode_block, encode_block, make_codec
from sglang_plt.codec.int_groups import IntGroups
from tests.codec.correlated import MODEL, NAMES, ROTARY, SOURCE, profile_of
from tests.codec.near import POSITION, encoded, mode, near, sealed, whole
from tests.codec.pools import all_bytes, some_slots

LAYERS = SOURCE.layers
ROWS = SOURCE.rows(90, seed=1)
PLAIN = ("raw", "int8", "int4")


def codec_of(name: str, pool: PoolRows, group: int = 1, kernels: bool = True):
    if name in NAMES:
        return make_codec(name, pool, ROTARY, profile_of(SOURCE, name, group=group))
    return make_codec(name, pool, ROTARY) if kernels or name == "raw" else IntGroups(pool, ROTARY, int(name[3:]), False)


def block_of(name: str, rows: list[torch.Tensor] = ROWS, position: int = 2, group: int = 1) -> np.ndarray:
    """The block of ``rows``; at position 2 two of them are exact."""
    slots = some_slots(len(rows[0]))
    return encode_block(codec_of(name, SOURCE.pool(rows, slots, ROTARY, position), group), MODEL, slots, position)


def layer_bytes(pool: PoolRows, layer: int) -> torch.Tensor:
    return all_bytes(PoolRows(pool.layout, (pool.keys[layer],), (pool.values[layer],)))


def check_steps(block, start, stop, position, make=codec_of, group=1, references=(), **kwargs) -> None:
    """Decode step by step beside a decode in one go."""
    whole_pool, pool, untouched = SOURCE.empty(), SOURCE.empty(), SOURCE.empty()
    slots = some_slots(stop - start, seed=2)
    name = kwargs.pop("name")
    decode_block(make(name, whole_pool, group, **kwargs), MODEL, block, start, stop, slots, position, references)
    writer = begin_block(make(name, pool, group, **kwargs), MODEL, block, start, stop, slots, position, references)
    assert torch.equal(all_bytes(pool), all_bytes(untouched))
    for done in range(1, LAYERS + 1):
        writer.write_to(done)
        writer.write_to(done - 1)
        assert writer.written == done
        for layer in range(done):
            assert torch.equal(layer_bytes(pool, layer), layer_bytes(whole_pool, layer))
        for layer in range(-(-done // group) * group, LAYERS):
            assert torch.equal(layer_bytes(pool, layer), layer_bytes(untouched, layer))
    writer.write_all()
    assert torch.equal(all_bytes(pool), all_bytes(whole_pool))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("start", "stop"), [(0, 90), (1, 70), (30, 31)])
def test_layers_of_plain_codecs(name, start, stop, kernels):
    check_steps(block_of(name), start, stop, 2, name=name, kernels=kernels)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("start", "stop"), [(0, 90), (1, 70), (0, 2), (30, 31)])
def test_layers_of_predicted_codecs(name, start, stop, group):
    check_steps(block_of(name, group=group), start, stop, 2, name=name, group=group)


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_escaped_rows(name):
    rows = [row.clone() for row in ROWS]
    for row in rows:
        row[40] *= 1e6
    check_steps(block_of(name, rows), 0, 90, 2, name=name)


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_differences(name):
    reference = encoded(name, ROWS)
    block = encoded(name, near(ROWS, 0.02), [whole(reference, 60)])
    assert mode(block) == 2
    check_steps(block, 0, 90, POSITION, name=name, references=[reference])


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_the_fallback(name):
    rows = [1000 * torch.randn(row.shape, generator=torch.Generator().manual_seed(3)) for row in ROWS]
    block = block_of(name, rows)
    assert mode(block) == 1
    check_steps(block, 0, 90, 2, name=name)


def damages(block: np.ndarray) -> list[np.ndarray]:
    """A bit that the checksum shows, and payloads cut short that it does not."""
    flipped = block.copy()
    flipped[-1] ^= 1
    return [flipped, sealed(block[:-1]), sealed(block[: len(block) // 2])]


@pytest.mark.parametrize("name", [*PLAIN, *NAMES])
def test_all_damage_is_found_before_the_first_layer(name):
    pool, slots = SOURCE.empty(), some_slots(90, seed=2)
    for damaged in damages(block_of(name)):
        with pytest.raises(BlockDamaged):
            begin_block(codec_of(name, pool), MODEL, damaged, 0, 90, slots, 2)
    assert torch.equal(all_bytes(pool), all_bytes(SOURCE.empty()))


def test_damage_of_the_entropy_code_is_found_before_the_first_layer():
    block, pool = block_of("dense").copy(), SOURCE.empty()
    found = 0
    for at in range(len(block) - 200, len(block)):  # its words and escapes are what a payload ends with
        damaged = block.copy()
        damaged[at] ^= 0x55
        try:
            writer = begin_block(codec_of("dense", pool), MODEL, sealed(damaged), 0, 90, some_slots(90), 2)
        except BlockDamaged:
            found += 1
        else:
            writer.write_all()  # another block, but a whole one
    assert found


def test_a_writer_lets_go_of_what_it_read():
    calls = []
    writer = LayerWriter(4, lambda first, stop: calls.append((first, stop)))
    for stop in (0, 1, 1, 3, 2, 9, 9):
        writer.write_to(stop)
    assert calls == [(0, 1), (1, 3), (3, 4)]
    assert writer._write is None


def test_a_step_that_fails_can_be_tried_again():
    attempts = []

    def write(first: int, stop: int) -> None:
        attempts.append((first, stop))
        if len(attempts) == 1:
            raise MemoryError

    writer = LayerWriter(2, write)
    with pytest.raises(MemoryError):
        writer.write_to(1)
    assert writer.written == 0
    writer.write_all()
    assert attempts == [(0, 1), (0, 2)]
