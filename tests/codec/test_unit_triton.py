"""Profiled codecs decoded by Triton kernels (here in the interpreter): the rows of the torch path."""

import pytest
import torch

from sglang_plt.codec import Reference, Stretch, begin_block, decode_block, encode_block, make_codec
from tests.codec.correlated import (
    HIDDEN,
    MODEL,
    NAMES,
    ROTARY,
    SOURCE,
    STEP,
    Source,
    of_tokens,
    profile_of,
    read,
    some_embedding,
    some_tokens,
)
from tests.codec.near import near
from tests.codec.pools import make_rotary, some_slots

SHAPES = {
    "gqa": (SOURCE, ROTARY, 1),
    "three layers a unit": (Source(layers=5), ROTARY, 3),
    "gptj": (Source(heads=1), make_rotary(16, is_neox=False), 1),
    "no bands' width": (Source(layers=2, heads=1, dim=20, v_dim=10), make_rotary(20), 1),
    "rotated keys": (Source(layers=2), None, 1),
    "bfloat16": (Source(layers=2, dtype=torch.bfloat16), ROTARY, 1),
}
COUNT = 70
TOKENS = some_tokens(COUNT, 3)


def both(name, source, rotary, group, block, start, stop, references=(), position=300):
    """Rows ``start .. stop`` by the kernels and by torch, as of :func:`read`."""
    found, where = [], some_slots(stop - start, seed=2)
    for triton in (True, False):
        pool = source.empty()
        profile = profile_of(source, name, rotary is None, group, hidden=HIDDEN, says=1.0)
        codec = make_codec(name, pool, rotary, profile, some_embedding(), triton=triton)
        decode_block(codec, MODEL, block, start, stop, where, position, references, TOKENS)
        written = torch.stack([buffer.float().flatten(1).isnan().all(1) for buffer in (*pool.keys, *pool.values)])
        assert (~written).sum(1).tolist() == len(written) * [stop - start]
        found.append(read(pool, where, rotary, position + start))
    return found


def encoded(name, source, rotary, group, rows, references=(), tokens=TOKENS, position=300):
    slots = some_slots(COUNT)
    profile = profile_of(source, name, rotary is None, group, hidden=HIDDEN, says=1.0)
    codec = make_codec(name, source.pool(rows, slots, rotary, position), rotary, profile, some_embedding())
    return encode_block(codec, MODEL, slots, position, references, tokens)


def rows_of(source):
    rows = source.rows(COUNT, 1)
    rows[0] += of_tokens(source, TOKENS)
    return rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("shape", "given"), [*((shape, True) for shape in SHAPES), ("gqa", False)])
def test_rows_are_those_of_torch(name, shape, given):
    source, rotary, group = SHAPES[shape]
    block = encoded(name, source, rotary, group, rows_of(source), tokens=TOKENS if given else None)
    for start, stop in ((0, COUNT), (20, 41)):
        got, want = both(name, source, rotary, group, block, start, stop)
        rounding = 0.0 if source.dtype == torch.float32 else 2.0**-6
        torch.testing.assert_close(got, want, rtol=rounding, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_exact_escaped_and_referred_rows_are_those_of_torch(name):
    rows = rows_of(SOURCE)
    reference = encoded(name, SOURCE, ROTARY, 1, rows)
    changed = near(rows, 0.05)
    changed[1][33] = 1e6
    block = encoded(name, SOURCE, ROTARY, 1, changed, [Reference(reference, (Stretch(10, 10, 50),))], position=2)
    got, want = both(name, SOURCE, ROTARY, 1, block, 0, COUNT, [reference], position=2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-3)
    assert (got - torch.stack(changed))[:, 34:].abs().max() <= 6 * STEP


def test_layers_are_written_one_by_one():
    block = encoded("fast", SOURCE, ROTARY, 1, rows_of(SOURCE))
    pool, where = SOURCE.empty(), some_slots(COUNT, seed=2)
    codec = make_codec(
        "fast", pool, ROTARY, profile_of(SOURCE, "fast", hidden=HIDDEN, says=1.0), some_embedding(), True
    )
    writer = begin_block(codec, MODEL, block, 0, COUNT, where, 300, tokens=TOKENS)
    for layer in range(3):
        assert pool.keys[layer][where].isnan().all()
        writer.write_to(layer + 1)
        assert not pool.keys[layer][where].isnan().any()


def test_odd_head_dims_are_refused():
    source = Source(dim=5)
    with pytest.raises(ValueError, match=r"even head dims, got 5 and 16; leave --plt-triton off"):
        make_codec("fast", source.empty(), None, profile_of(source, "fast", True), triton=True)
