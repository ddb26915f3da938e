"""What decoding computes: counted on real blocks, and beside models that are not run."""

from dataclasses import replace

import pytest
import torch

from sglang_plt.codec import ProfileInfo, Rotary
from sglang_plt.quality.components import Used, used_components
from sglang_plt.quality.geometry import MODELS, PROMPT_TOKENS, decode_flops, geometry_rows, geometry_table
from sglang_plt.quality.model import Rows
from tests.codec.correlated import ROTARY, Source, profile_of
from triton_ops.band_codes import BAND

SOURCE = Source()


def put(layers: list[torch.Tensor], source: Source = SOURCE, rotary: Rotary | None = ROTARY) -> Rows:
    count = len(layers[0])
    pool = source.pool(layers, torch.arange(count), rotary, 0)
    return Rows(*(tuple(buffer[:count] for buffer in kind) for kind in (pool.keys, pool.values)))


def as_predicted(codec: str, components: tuple[int, ...], count: int) -> Rows:
    """Rows of nothing but some components of the first layer, three steps each, and what follows of them."""
    rows: list[torch.Tensor] = []
    for unit in profile_of(SOURCE, codec).units:
        rest = rows[-1] @ unit.weights.dense() if rows else 3 * unit.basis.dense()[list(components)].sum(0)
        rows.append(unit.bias.expand(count, -1) + rest)
    return put(rows)


@pytest.mark.parametrize("name", ["fast", "dense"])
def test_the_share_is_what_is_not_zero_in_a_block(name):
    profile = profile_of(SOURCE, name)
    rows = as_predicted(name, (), 300)
    before = torch.stack((*rows.keys, *rows.values)).clone()
    assert used_components(name, profile, [rows], ROTARY) == Used(0.0, 1, 2)
    assert torch.equal(torch.stack((*rows.keys, *rows.values)), before)
    three = used_components(name, profile, [as_predicted(name, (0, 1, 20), 60)], ROTARY)
    number = {"fast": 2 * BAND, "dense": 3}[name]  # a decoder of fixed widths takes whole bands
    assert three.share == number / (SOURCE.layers * SOURCE.width)
    every = used_components(name, profile, [put(SOURCE.rows(300, 1))] * 2, ROTARY)
    assert 1 / SOURCE.layers <= every.share <= 1
    assert every.blocks == 4
    assert used_components(name, profile_of(SOURCE, name, group=3), [rows, rows], ROTARY).group == 3


def test_padding_of_a_band_is_no_component():
    source = Source(layers=1, heads=1, dim=10, v_dim=10, noise=1.0)  # 20 of 32
    found = used_components(
        "fast", profile_of(source, "fast", rotated=True), [put(source.rows(40, 1), source, None)], None
    )
    assert found.share == 1


def test_blocks_that_fall_back_are_not_counted():
    rows = put(SOURCE.rows(40, 1))
    other = Rows(tuple(1e4 * torch.randn_like(key) for key in rows.keys), rows.values)
    assert used_components("dense", profile_of(SOURCE, "dense"), [other], ROTARY) is None


def test_what_is_skipped_is_not_counted():
    info = ProfileInfo("dense", "m", "float32", 2, 1, 2, 1, 1, True, 0.1, 1.0, 100, "fisher")
    assert decode_flops(info, 0.5) == 2 * 9 + 2 * (9 + 9) / 2
    assert decode_flops(replace(info, group=2), 0.0) == 0  # one unit, and nothing below it
    model = MODELS["llama-3.1-8b"]
    assert model.heads * model.head_dim == model.hidden
    attention = model.prompt_flops(3) - model.prefill_flops
    assert attention == 4 * 32 * 4096 * (1 + 2 + 3) / 3


def test_projections_have_names_of_their_own():
    used = {"fast": Used(0.5, 1, 12), "dense": Used(0.2, 3, 12)}
    rows = geometry_rows(used=used)
    found = {(row.metric, row.arm): row.value for row in rows}
    assert {row.n for row in rows if "_used" in row.metric and row.metric != "components_used"} == {0}
    for name in MODELS:
        part = found["decode_flops_share", name]
        assert (
            part > found["decode_flops_share_used", f"{name}/fast"] > found["decode_flops_share_used", f"{name}/dense"]
        )
        long = found[f"decode_flops_share_{PROMPT_TOKENS}", name]
        assert long * found[f"prefill_flops_{PROMPT_TOKENS}", name] == pytest.approx(part * MODELS[name].prefill_flops)
        assert found[f"decode_flops_share_used_{PROMPT_TOKENS}", f"{name}/dense"] < long < part
    assert found["components_used", "dense/group3"] == 0.2
    text = geometry_table(rows)
    assert "llama-3.1-8b, dense (projected)" in text
    assert (
        "dense computed 20.0 % of its inverse transform on the model measured here (12 blocks, a profile of 3" in text
    )
    assert "projected" not in geometry_table(geometry_rows())
