"""Blocks coded as differences: rows outside the format, references that do not serve, damage, threads, pinned bytes."""

import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.codec import BlockDamaged, Reference, Stretch, decode_block, encode_block, make_codec
from sglang_plt.codec.block import HEADER_BYTES
from sglang_plt.codec.reference import Sources
from tests.codec.correlated import MODEL, NAMES, ROTARY, SOURCE, STEP, profile_of, read
from tests.codec.near import decoded, encoded, joined, mode, near, picked, sealed, whole
from tests.codec.pools import all_bytes, some_slots

BASE = SOURCE.rows(100, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e6, 5e4])
def test_rows_outside_the_format_poison_no_others(name, bad):
    there, here = [row.clone() for row in BASE], near(BASE, 0.02)
    there[1][30, 40], here[2][50, 33:] = bad, bad  # values of the reference, and of the block
    there[0][70, 60], here[0][70, 60] = bad, bad
    reference = encoded(name, there)
    block = encoded(name, here, [whole(reference, 100)])
    assert mode(block) == 2
    got, rest = decoded(name, block, [reference]), torch.ones(100, dtype=torch.bool)
    rest[[50, 70]] = False
    assert (got - torch.stack(here))[:, rest].abs().max() <= 6 * STEP
    for row in (50, 70):
        torch.testing.assert_close(got[:, row], torch.stack(here)[:, row], rtol=1e-4, atol=0.1, equal_nan=True)
    for start, stop in ((0, 50), (50, 51), (29, 31), (51, 100)):
        part = decoded(name, block, [reference], start=start, stop=stop)
        torch.testing.assert_close(part, got[:, start:stop], rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_an_escaped_row_costs_no_differences(name):
    here = near(BASE, 0.02)
    without = len(encoded(name, here, [whole(encoded(name, BASE), 100)]))
    here[0][50] = float("nan")
    block = encoded(name, here, [whole(encoded(name, BASE), 100)])
    assert len(block) < without + 4 * SOURCE.width * SOURCE.layers + 40


@pytest.mark.parametrize("name", NAMES)
def test_a_row_at_the_other_end_of_the_range_is_escaped(name):
    # components of both are within 16383 steps, their difference is not
    there, here = [row.clone() for row in BASE], near(BASE, 0.02)
    far = 10000 * profile_of(SOURCE, name).units[2].basis.dense()[7]
    there[2][40] += far
    here[2][40] -= far
    reference, rest = encoded(name, there), torch.arange(100) != 40
    assert reference[HEADER_BYTES + 2] == encoded(name, here)[HEADER_BYTES + 2] == 0
    block = encoded(name, here, [whole(reference, 100)])
    assert block[HEADER_BYTES + 2] == 1
    got = decoded(name, block, [reference])
    torch.testing.assert_close(got[:, 40], torch.stack(here)[:, 40], rtol=1e-5, atol=1e-2)
    assert (got - torch.stack(here))[:, rest].abs().max() <= 6 * STEP


@pytest.mark.parametrize("name", NAMES)
def test_references_that_do_not_serve_are_left_out(name):
    rows = near(BASE, 0.02)
    alone, good = encoded(name, rows), encoded(name, BASE)
    damaged = good.copy()
    damaged[200] ^= 4
    short = sealed(np.concatenate((good[:HEADER_BYTES], good[HEADER_BYTES + 20 :])))
    other = encoded(name, BASE, profile=profile_of(SOURCE, name, seed=101))
    stored = encoded(name, [1000 * row for row in BASE])
    difference = encoded(name, BASE, [whole(good, 100)])
    assert (mode(stored), mode(difference)) == (1, 2)
    wrong_codec = encoded("int8", BASE, profile=profile_of(SOURCE, name))
    for block in (damaged, short, other, stored, difference, wrong_codec, good[:90], good[:10]):
        assert np.array_equal(encoded(name, rows, [whole(block, 100)]), alone)
    assert mode(encoded(name, rows, [whole(damaged, 100), whole(good, 100)])) == 2
    assert np.array_equal(encoded("int8", rows, [whole(good, 100)]), encoded("int8", rows))


@cache
def parts(name: str) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """A block with two exact rows, an escaped one, rows of their own and rows in groups; its reference; its rows."""
    reference = encoded(name, BASE)
    near_rows, far, unlike = near(BASE, 0.02), near(BASE, 0.3), SOURCE.rows(12, 8)
    rows = joined(picked(near_rows, slice(0, 40)), picked(near_rows, slice(60, 80)), picked(far, slice(80, 86)), unlike)
    rows[1][20] = 1e6
    block = encoded(name, rows, [Reference(reference, (Stretch(60, 40, 26), Stretch(0, 0, 40)))], position=2)
    assert mode(block) == 2
    return block, reference, torch.stack(rows)


def attempt(name: str, block: np.ndarray, references: list[np.ndarray], start: int = 0, stop: int = 78) -> bool:
    """Whether a block decodes; what was refused must have written nothing, what was not only its own slots."""
    pool, slots = SOURCE.empty(fill=0.5), some_slots(stop - start, seed=2)
    codec, before = make_codec(name, pool, ROTARY, profile_of(SOURCE, name)), all_bytes(pool)
    try:
        decode_block(codec, MODEL, block, start, stop, slots, 2, references)
    except BlockDamaged:
        assert torch.equal(all_bytes(pool), before)
        return False
    others = torch.ones(len(pool.keys[0]), dtype=torch.bool)
    others[slots] = False
    assert all(bool((buffer[others] == 0.5).all()) for buffer in (*pool.keys, *pool.values))
    return True


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_written_without_the_right_reference(name):
    block, reference, _ = parts(name)
    damaged = reference.copy()
    damaged[300] ^= 1
    assert attempt(name, block, [reference])
    other = encoded(name, near(BASE, 0.01))
    for references in ([], [other], [damaged], [block], [sealed(damaged)], [reference, damaged], [reference[:50]]):
        assert not attempt(name, block, references)
    assert attempt(name, block, [other, block, reference])
    assert attempt(name, block, [], 0, 2)  # exact rows need none
    with pytest.raises(BlockDamaged, match=r"^payload: it needs the reference block of checksum 0x"):
        decoded(name, block, position=2)


@settings(max_examples=150)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["block", "reference", "alone"]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.sampled_from([0, 2, 78]),
    st.one_of(st.none(), st.floats(0, 1)),
    st.booleans(),
)
def test_payloads_of_any_bytes_are_refused_or_stay_in_their_slots(name, which, changes, stop, cut, front):
    block, reference, _ = parts(name)
    if which == "alone":
        block = encoded(name, picked(BASE, slice(0, 78)), position=2)
    victim = (reference if which == "reference" else block).copy()
    size = len(victim) - HEADER_BYTES - 1
    exact = 0 if which == "reference" else 2 * SOURCE.layout.row_bytes
    for where, value in changes:
        at = int(where * (min(size, exact + 1000) if front else size))
        victim[HEADER_BYTES + (at if at < 8 or at >= exact else exact + at % 64)] = value
    if cut is not None:
        victim = victim[: HEADER_BYTES + int(cut * size)]
    victim = sealed(victim)
    if which == "reference":  # the block names it as it is now
        block = block.copy()
        at = HEADER_BYTES + 8 + 2 * SOURCE.layout.row_bytes + 1 + 4 * SOURCE.width * SOURCE.layers + 2
        assert block[at : at + 8].tobytes() == reference[72:80].tobytes()
        block[at : at + 8] = victim[72:80]
        attempt(name, sealed(block), [victim], 0, stop)
    else:
        attempt(name, victim, [reference], 0, stop)


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_the_alignment_is_checked(name):
    block, reference, _ = parts(name)
    head = HEADER_BYTES + 8 + 2 * SOURCE.layout.row_bytes + 1 + 4 * SOURCE.width * SOURCE.layers
    assert block[head : head + 2].tolist() == [1, 2]
    refused = 0
    for at in range(head, head + 10 + 4 * 2 + 1):
        for value in (0, 1, 2, 3, 65, 200, 255):
            victim = block.copy()
            victim[at] = value
            refused += not attempt(name, sealed(victim), [reference])
    assert refused > 80


@pytest.mark.parametrize("name", NAMES)
def test_threads_share_references(name):
    blocks = [encoded(name, near(BASE, 0.01, seed)) for seed in range(7)]  # more than are kept open
    near_blocks = []
    for number, block in enumerate(blocks):
        other = blocks[(number + 1) % len(blocks)]
        near_blocks.append(
            encoded(name, near(BASE, 0.02), [whole(block, 50), Reference(other, (Stretch(50, 50, 50),))])
        )
    want = [decoded(name, block, blocks) for block in near_blocks]
    pool = SOURCE.empty()
    codec, order = make_codec(name, pool, ROTARY, profile_of(SOURCE, name)), [number % 7 for number in range(42)]
    slots = some_slots(400).split(100)

    def work(lane: int) -> None:
        for number in order[lane:] + order[:lane]:
            decode_block(codec, MODEL, near_blocks[number], 0, 100, slots[lane], 300, blocks[lane:] + blocks[:lane])
            assert torch.equal(read(pool, slots[lane], ROTARY, 300), want[number])

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, lane) for lane in range(3)]:
            done.result()


@pytest.mark.parametrize("name", NAMES)
def test_threads_that_encode_share_references(name):
    slots, references = some_slots(100), [whole(encoded(name, BASE), 100)]
    codec = make_codec(name, SOURCE.pool(near(BASE, 0.02), slots, ROTARY, 9), ROTARY, profile_of(SOURCE, name))
    want = encode_block(codec, MODEL, slots, 9, references)
    with ThreadPoolExecutor(3) as threads:
        for got in threads.map(lambda _: encode_block(codec, MODEL, slots, 9, references), range(12)):
            assert np.array_equal(got, want)


def test_alignments_outside_a_block_are_refused():
    good = Sources.of([1], [(Stretch(0, 0, 5), Stretch(9, 6, 2))], 8)
    data = good.pack()
    assert Sources.unpack(memoryview(data), 8)[1] == len(data)
    for rows in (5, 7):
        with pytest.raises(ValueError, match="has no Stretch"):
            Sources.unpack(memoryview(data), rows)
    with pytest.raises(ValueError, match="stretches of 9 rows share some, 8 are theirs"):
        Sources.unpack(memoryview(data[:10] + bytes((0, 0, 0, 6)) + data[14:]), 8)
    for length in (0, 1, 5, len(data) - 1):
        with pytest.raises((ValueError, struct.error)):
            Sources.unpack(memoryview(data[:length]), 8)
