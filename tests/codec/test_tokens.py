"""First layers predicted from tokens: bits, ranges, references, and tokens or embeddings that are others."""

import numpy as np
import pytest
import torch

from sglang_plt.codec import BlockDamaged, Reference, Stretch, TokenEmbedding, decode_block, encode_block, make_codec
from sglang_plt.codec.block import HEADER_BYTES
from sglang_plt.codec.coded import TOKENS
from tests.codec.correlated import (
    HIDDEN,
    MODEL,
    NAMES,
    ROTARY,
    SOURCE,
    STEP,
    VOCABULARY,
    of_tokens,
    profile_of,
    read,
    some_embedding,
    some_tokens,
)
from tests.codec.pools import some_slots

SAYS = 30.0
IDS = some_tokens(200, 3)


def spoken_rows(tokens: np.ndarray = IDS, seed: int = 1) -> list[torch.Tensor]:
    """Rows of which the first layer's are mostly what their tokens say."""
    rows = SOURCE.rows(len(tokens), seed)
    rows[0] += SAYS * of_tokens(SOURCE, tokens)
    return rows


def codec_of(name, pool, embedding=True):
    profile = profile_of(SOURCE, name, hidden=HIDDEN, says=SAYS)
    return make_codec(name, pool, ROTARY, profile, some_embedding() if embedding is True else embedding)


def encoded(name, tokens=IDS, rows=None, position=300, references=(), embedding=True, given=True):
    rows = spoken_rows(tokens) if rows is None else rows
    slots = some_slots(len(tokens))
    codec = codec_of(name, SOURCE.pool(rows, slots, ROTARY, position), embedding)
    return encode_block(codec, MODEL, slots, position, references, tokens if given else None)


def decoded(name, block, tokens=IDS, position=300, start=0, stop=None, references=(), embedding=True):
    stop = len(IDS) if stop is None else stop
    pool, slots = SOURCE.empty(), some_slots(stop - start, seed=2)
    codec = codec_of(name, pool, embedding)
    decode_block(codec, MODEL, block, start, stop, slots, position, references, tokens)
    return read(pool, slots, ROTARY, position + start)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [0, 2, 300])
def test_rows_come_back_in_fewer_bits(name, position):
    block, without = encoded(name, position=position), encoded(name, position=position, given=False)
    assert len(block) < 0.9 * len(without)
    want = torch.stack(spoken_rows())
    for data, tokens in ((block, IDS), (without, IDS), (without, None)):
        got = decoded(name, data, tokens, position)
        assert (got - want).abs().max() <= 6 * STEP
    assert block[HEADER_BYTES] == TOKENS
    assert without[HEADER_BYTES] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("start", "stop"), [(0, 7), (1, 3), (40, 100), (199, 200)])
def test_row_ranges_are_slices_of_the_whole(name, start, stop):
    block = encoded(name, position=2)
    whole = decoded(name, block, position=2)
    part = decoded(name, block, position=2, start=start, stop=stop)
    torch.testing.assert_close(part, whole[:, start:stop], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_differences_add_to_what_the_own_tokens_say(name):
    reference, changed = encoded(name), IDS.copy()
    changed[50:60] = (changed[50:60] + 1) % VOCABULARY
    rows = spoken_rows(changed)
    found = [Reference(reference, (Stretch(0, 0, 200),))]
    block = encoded(name, changed, rows, references=found)
    assert block[HEADER_BYTES] == 2 + TOKENS
    assert len(block) < 0.1 * len(reference)  # where tokens differ, nothing but that does
    got = decoded(name, block, changed, references=[reference])
    assert (got - torch.stack(rows)).abs().max() <= 6 * STEP


@pytest.mark.parametrize("name", NAMES)
def test_other_tokens_are_refused_before_a_row_is_written(name):
    block = encoded(name)
    other = IDS.copy()
    other[7] += 1
    for tokens in (None, other, IDS[::-1].copy()):
        with pytest.raises(BlockDamaged, match="tokens"):
            decoded(name, block, tokens)
    for tokens in (IDS[:-1], IDS.astype(np.int32), IDS[:, None]):
        with pytest.raises(ValueError, match=r"tokens must be int64 \[200\]"):
            decoded(name, block, tokens)


@pytest.mark.parametrize("name", NAMES)
def test_an_embedding_that_is_gone_or_changed_serves_no_block(name):
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5))
    embedding = TokenEmbedding(weight, torch.device("cpu"))
    block = encoded(name, embedding=embedding)
    assert np.array_equal(block, encoded(name))
    with torch.inference_mode():
        weight.data.copy_(weight + 1)  # as new weights are loaded
    for other in (None, embedding):
        with pytest.raises(BlockDamaged, match="embedding"):
            decoded(name, block, embedding=other)
        assert encoded(name, embedding=other)[HEADER_BYTES] == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_embedding_of_another_width_is_refused(name):
    other = TokenEmbedding(torch.ones(5, HIDDEN + 1), torch.device("cpu"))
    with pytest.raises(ValueError, match=f"an embedding of {HIDDEN} channels, not {HIDDEN + 1}"):
        codec_of(name, SOURCE.empty(), other)


@pytest.mark.parametrize("name", NAMES)
def test_ids_that_are_no_words_come_back_too(name):
    tokens = IDS.copy()
    tokens[[3, 90]] = [-1, 1 << 60]
    rows = spoken_rows(tokens)
    got = decoded(name, encoded(name, tokens, rows), tokens)
    assert (got - torch.stack(rows)).abs().max() <= 6 * STEP


def test_features_have_unit_size_or_are_zero():
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 1e-3]]).bfloat16()
    found = TokenEmbedding(weight, torch.device("cpu"))(np.array([0, 1, 2, 3, -1]))
    torch.testing.assert_close(found.pow(2).mean(1), torch.tensor([1.0, 0, 1, 0, 0]))
    assert found.dtype == torch.float32
