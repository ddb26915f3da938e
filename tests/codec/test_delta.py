"""Blocks coded as differences from others: against a slow twin, errors and bytes, ranges, positions, stretches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.codec import BlockHeader, Reference, Stretch, exact_rows
from sglang_plt.codec.block import HEADER_BYTES
from tests.codec.correlated import NAMES, SOURCE, STEP, Source, profile_of
from tests.codec.near import decoded, encoded, joined, mode, near, picked, twin, whole

RMS = 0.5 * STEP
"""Of differences: those within the dead zone of 0.85 steps are lost, and what is beyond loses up to as much."""
BASE = SOURCE.rows(256, 1)


def checksum(block: np.ndarray) -> int:
    return int.from_bytes(block[72:80].tobytes(), "little")


@st.composite
def stretches(draw, rows: int, reference_rows: int):
    length = draw(st.integers(1, min(rows, reference_rows)))
    return Stretch(draw(st.integers(0, reference_rows - length)), draw(st.integers(0, rows - length)), length)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(NAMES))
def test_decoded_rows_are_those_of_the_slow_twin(data, name):
    source = data.draw(st.sampled_from([Source(layers=2, heads=1), Source(layers=5, heads=1, dim=16, v_dim=10)]))
    profile = profile_of(source, name, group=data.draw(st.sampled_from([1, 3])), predicts=data.draw(st.booleans()))
    num_rows, position = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 2, 3, 4, 700]))
    rows = near(source.rows(40, 1), data.draw(st.sampled_from([0.0, 0.02, 0.2])))
    references = []
    for _ in range(data.draw(st.integers(1, 3))):
        count, at = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 3, 500]))
        other = picked(source.rows(40, 1), slice(count))
        if count >= 10 and data.draw(st.booleans()):
            other[0][count // 2] = 1e6  # escaped
        block = encoded(name, other, (), at, source, profile)
        references.append(Reference(block, tuple(data.draw(st.lists(stretches(num_rows, count), max_size=4)))))
    rows = picked(rows, slice(num_rows))
    if num_rows >= 14 and data.draw(st.booleans()):  # in fewer, int8 is shorter, and refuses
        rows[-1][num_rows // 2, 0] = float("nan")
    block, blocks = encoded(name, rows, references, position, source, profile), [one.block for one in references]
    got = decoded(name, block, blocks, position, source=source, profile=profile)
    exact = exact_rows(position, num_rows)
    if num_rows > exact and mode(block) != 1:
        want, _ = twin(name, block, {checksum(one): one for one in blocks}, source, profile)
        torch.testing.assert_close(got[:, exact:], want, rtol=1e-5, atol=1e-3, equal_nan=True)
    stored = torch.stack(rows)
    torch.testing.assert_close(got[:, :exact], stored[:, :exact], rtol=1e-4, atol=1e-3, equal_nan=True)
    good = torch.isfinite(stored).all(2).all(0)
    assert (got - stored)[:, good].abs().max() <= 6 * STEP if good.any() else True
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    part = decoded(name, block, blocks, position, start, stop, source, profile)
    torch.testing.assert_close(part, got[:, start:stop], rtol=0, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_its_reference_and_the_linear_part_of_its_differences(name):
    reference = encoded(name, BASE)
    block = encoded(name, picked(near(BASE, 0.2), slice(20, 60)), [whole(reference, 40, first=20)])
    assert mode(block) == 2
    _, added = twin(name, block, {checksum(reference): reference}, SOURCE, profile_of(SOURCE, name))
    base, got = decoded(name, reference, start=20, stop=60), decoded(name, block, [reference])
    assert added.abs().max() > STEP
    torch.testing.assert_close(got, base + added, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_errors_stay_within_the_quantiser_and_grow_over_no_layer(name, share):
    rows, reference = near(BASE, share), encoded(name, BASE)
    block = encoded(name, rows, [whole(reference, 256)])
    got, want = decoded(name, block, [reference]), torch.stack(rows)
    assert (got - want).pow(2).mean((1, 2)).sqrt().max() <= RMS
    assert (got - want).abs().max() <= 6 * STEP


@pytest.mark.parametrize(("name", "copy", "close"), [("fast", 0.03, 0.06), ("dense", 0.01, 0.06)])
def test_what_resembles_its_reference_takes_a_small_share(name, copy, close):
    reference = encoded(name, BASE)
    alone = len(encoded(name, near(BASE, 0.02)))
    assert len(encoded(name, BASE, [whole(reference, 256)])) < copy * alone
    assert len(encoded(name, near(BASE, 0.02), [whole(reference, 256)])) < close * alone
    if name == "dense":  # headers, one stretch, and the models of nothing
        assert len(encoded(name, BASE, [whole(reference, 256)])) < 200


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("position", "reference_position"), [(300, 0), (0, 300), (0, 0), (1, 2), (700, 20)])
def test_positions_of_both_are_free(name, position, reference_position):
    rows, reference = near(BASE, 0.02), encoded(name, BASE, position=reference_position)
    block = encoded(name, rows, [whole(reference, 256)], position)
    alone = encoded(name, rows, position=position)
    exact, unpaired = exact_rows(position, 256), exact_rows(reference_position, 256)
    assert mode(block) == 2
    assert len(block) < 0.1 * len(alone) + (exact + unpaired) * SOURCE.layout.row_bytes
    got, want = decoded(name, block, [reference], position), torch.stack(rows)
    torch.testing.assert_close(got[:, :exact], want[:, :exact], rtol=1e-4, atol=1e-4)
    assert (got - want)[:, exact:].pow(2).mean().sqrt() <= RMS
    if not exact:
        there = decoded(name, block, [reference], position + 60)
        torch.testing.assert_close(there, got, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_several_references(name):
    first, second = encoded(name, picked(BASE, slice(0, 100))), encoded(name, picked(BASE, slice(80, 256)), position=9)
    rows = near(joined(picked(BASE, slice(150, 200)), SOURCE.rows(20, 9), picked(BASE, slice(10, 60))), 0.02)
    # out of order, and the first to name a row has it: rows 70 to 89 are of `first`, of row 0 of `second` there is none
    references = [
        Reference(first, (Stretch(30, 90, 30), Stretch(10, 70, 20))),
        Reference(second, (Stretch(70, 0, 50), Stretch(0, 75, 20))),
    ]
    block = encoded(name, rows, references)
    for order in ([first, second], [second, first], [encoded(name, BASE), second, first]):
        got = decoded(name, block, order)
        assert (got - torch.stack(rows)).pow(2).mean((1, 2)).sqrt().max() <= RMS
    assert len(block) < 0.35 * len(encoded(name, rows))
    unlike = encoded(name, rows, [references[0], Reference(second, (Stretch(70, 0, 50),))])
    assert np.array_equal(block, unlike)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_a_reference_are_coded_as_ever(name):
    reference, rows = encoded(name, BASE), near(BASE, 0.02)
    alone = encoded(name, rows)
    for nothing in ((), (Stretch(0, 256, 20),), (Stretch(256, 0, 20),), (Stretch(9, 9, 0),)):
        assert np.array_equal(encoded(name, rows, [Reference(reference, nothing)]), alone)
    one = encoded(name, picked(rows, slice(7, 8)), [whole(reference, 1, first=7)])
    assert BlockHeader.unpack(one).num_rows == 1
    got = decoded(name, one, [reference])
    assert (got[:, 0] - torch.stack(rows)[:, 7]).pow(2).mean().sqrt() <= 2 * RMS
    few = encoded(name, picked(rows, slice(0, 3)), [whole(reference, 3)], position=0)  # all exact
    assert np.array_equal(few, encoded(name, picked(rows, slice(0, 3)), position=0))
    none = encoded(name, picked(rows, slice(0, 3)), position=0)  # no row of it is coded
    assert np.array_equal(encoded(name, rows, [whole(none, 3)]), alone)


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_stretches_are_kept(name):
    reference = encoded(name, BASE)
    order = torch.tensor([row ^ 1 for row in range(200)] + list(range(200, 256)))  # pairs changed places
    rows = near(picked(BASE, order), 0.02)
    found = Reference(reference, tuple(Stretch(int(at), row, 1) for row, at in enumerate(order)))
    block = encoded(name, rows, [found])
    assert block[HEADER_BYTES + 8 : HEADER_BYTES + 10].tolist() == [1, 64]
    longest = block[HEADER_BYTES + 18 + 4 * 63 :][:4].tolist()
    assert longest == [0, 200, 200, 55]
    assert (decoded(name, block, [reference]) - torch.stack(rows)).pow(2).mean().sqrt() <= RMS


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_eight_references_are_named(name):
    blocks = [encoded(name, picked(BASE, slice(20 * at, 20 * at + 20))) for at in range(12)]
    rows = near(BASE, 0.02)
    references = [whole(block, 20, row=20 * at) for at, block in enumerate(blocks)]
    block = encoded(name, rows, references)
    assert block[HEADER_BYTES + 8] == 8
    assert (decoded(name, block, blocks[:8]) - torch.stack(rows)).pow(2).mean().sqrt() <= RMS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [2, 3])
def test_unrelated_references_cost_nothing(name, seed):
    reference, other = encoded(name, BASE), SOURCE.rows(256, seed)
    block, alone = encoded(name, other, [whole(reference, 256)]), encoded(name, other)
    assert len(block) <= len(alone)
    half = joined(picked(BASE, slice(0, 128)), picked(other, slice(0, 128)))
    mixed = encoded(name, near(half, 0.02), [Reference(reference, (Stretch(0, 0, 128), Stretch(9, 128, 128)))])
    assert len(mixed) < 0.6 * len(alone)
