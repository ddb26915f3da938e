"""A tiny run of the restore benchmark without a server: every arm brings the rows back, and no row is missing."""

import pytest
import torch

from bench_serving import restore, restore_steps
from bench_serving.restore_arms import MEMCPY, Mover, Sequences
from sglang_plt.codec import Rotary
from sglang_plt.config import CODECS
from sglang_plt.quality.model import Rows

LAYERS, HEADS, DIM, TOKENS = 2, 2, 32, 512


def make_rotary() -> Rotary:
    angles = torch.arange(TOKENS)[:, None] / 100 ** (torch.arange(0, DIM, 2) / DIM)
    return Rotary(torch.cat((angles.cos(), angles.sin()), dim=1).float(), True, DIM)


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        tuple(torch.randn(2 * TOKENS, HEADS, DIM, generator=generator) for _ in range(LAYERS)) for _ in range(2)
    )
    return Sequences(Rows(keys, values), TOKENS, make_rotary())


@pytest.fixture(scope="module")
def result(sequences):
    rates = restore.measure(sequences, lambda index: 100.0 + index, rounds=3)
    steps = restore_steps.measure(sequences, "int8", count=6)
    return rates, steps, restore.rows_of(rates, steps)


def test_rows_are_those_that_readers_look_for(result):
    _, _, rows = result
    found = {(row.metric, row.arm): row for row in rows}
    assert len(found) == len(rows)
    for suffix in restore.DTYPES:
        fastest = max(found["memcpy_tokens_per_s", arm + suffix].value for arm in MEMCPY)
        for codec in CODECS:
            arm = codec + suffix
            rate = found["restore_tokens_per_s", arm].value
            assert found["restore_vs_memcpy", arm].value == pytest.approx(rate / fastest)
            assert found["restore_vs_prefill", arm].value == pytest.approx(rate / 101)
            assert found["encode_tokens_per_s", arm].value > 0
    assert found["prefill_tokens_per_s", "prefill"].value == 101
    assert all(row.lo <= row.value <= row.hi for row in rows)
    for arm in ("int8/write_ahead", "int8/no_write_ahead"):
        assert found["evict_step_p99_ms", arm].value >= found["evict_step_p50_ms", arm].value > 0
    for arm in ("256_tokens", "256_tokens_pool_full", "512_tokens", "512_tokens_pool_full"):
        assert found["restore_step_p99_ms", f"int8/{arm}"].n == 6


def test_the_table_tells_how_the_targets_stand(result):
    text = restore.table(result[2])
    assert "restore_vs_prefill of int4: " in text
    assert "target 40: met" in text


def test_an_arm_that_restores_something_else_is_refused(sequences, monkeypatch):
    monkeypatch.setattr(Mover, "_copy_with_torch", lambda self, host, slots: None)
    with pytest.raises(RuntimeError, match="memcpy_torch does not restore"):
        Mover(sequences, torch.float32)


def test_sequences_are_whole_blocks(sequences):
    with pytest.raises(ValueError, match="multiple of 256"):
        Sequences(sequences.rows, 500, None)


@pytest.mark.parametrize(
    "argv", [["--rounds", "1"], ["--model-path", "no/such/model"], ["--json", "no/such/file"], ["--prefill", "vllm"]]
)
def test_a_wrong_command_line_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        restore.main(argv)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert argv[0] in error
    assert argv[1] in error
