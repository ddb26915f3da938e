"""Rows of real model classes with random weights: profiles fitted to them, round trips, positions."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from sglang_plt.calibration.make import make_profile
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec import (
    EXACT_TOKENS,
    PoolRows,
    Profile,
    ProfileInfo,
    Rotary,
    decode_block,
    encode_block,
    make_codec,
)
from sglang_plt.quality.model import ReferenceModel, Rows
from tests.codec.pools import some_slots

STEP = 0.25
"""Of a layer's keys, or values, in standard deviations."""
RMS = {"fast": 0.45 * STEP, "dense": 0.31 * STEP, "int8": 0.05}
VOCABULARY, POSITIONS = 300, 512


class TinyModel(ReferenceModel):
    """A model that lies in memory, without a tokenizer."""

    def __init__(self, model) -> None:
        self._model = model.float().eval().requires_grad_(False)
        self.max_positions = POSITIONS


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
MODELS = {  # class, its settings, how many channels rotate and in which pairs
    "llama": ("Llama", {}, 16, True),
    "llama3": ("Llama", rope("llama3", **LLAMA3), 16, True),
    "linear": ("Llama", rope("linear", factor=4.0), 16, True),
    "yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=128), 16, True),
    "mha": ("Llama", {"num_key_value_heads": 4}, 16, True),
    "qwen2": ("Qwen2", {}, 16, True),
    "qwen3": ("Qwen3", {}, 16, True),
    "gpt_neox": ("GPTNeoX", rope("default", partial_rotary_factor=0.25), 4, True),
    "phi": ("Phi", rope("default", partial_rotary_factor=0.5), 8, True),
    "cohere": ("Cohere", {}, 16, False),
    "glm": ("Glm", rope("default", partial_rotary_factor=0.5), 8, False),
    "gptj": ("GPTJ", {"rotary_dim": 8, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}, None, False),
}


@cache
def make_model(name: str) -> TinyModel:
    import transformers

    kind, settings, _, _ = MODELS[name]
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": POSITIONS,
    }
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **({} if name == "gptj" else shape) | settings,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyModel(getattr(transformers, f"{kind}ForCausalLM")(config))


def some_ids(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def fitted(name: str, codec: str) -> tuple[TinyModel, Rotary | None, Profile]:
    """A model, its rotary, and the profile of its own rows."""
    model = make_model(name)
    rotary, layout = model.rotary(POSITIONS), model.layout
    key_width = layout.kv_heads * layout.head_dim
    moments = Moments(layout.num_layers, layout.kv_heads * (layout.head_dim + layout.v_head_dim))
    for seed in range(8):
        moments.add([layer[EXACT_TOKENS:] for layer in model.prefill(some_ids(seed, 250)).layers(rotary)])

    def even(unit: range) -> torch.Tensor:
        variances = moments.covariances(unit)[4].diagonal()
        parts = variances.split((key_width, len(variances) - key_width))
        return torch.diag(torch.cat([(1 / part.mean()).expand(len(part)) for part in parts]))

    info = ProfileInfo(
        codec=codec,
        model=name,
        dtype="float32",
        num_layers=layout.num_layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        v_head_dim=layout.v_head_dim,
        group=1,
        keys_rotated=rotary is None,
        step=STEP,
        scale=1.0,
        tokens=moments.count,
        sensitivity="kind",
    )
    return model, rotary, make_profile(info, moments, even)


def through(name: str, codec: str, rows: Rows, position: int, target: int) -> tuple[Rows, float]:
    """Rows that begin at ``position``, encoded and decoded to ``target``; and bits a number."""
    _, rotary, profile = fitted(name, codec if codec in ("fast", "dense") else "fast")
    slots = some_slots(len(rows))
    buffers = [[torch.full((400, *x.shape[1:]), float("nan")) for x in kind] for kind in (rows.keys, rows.values)]
    for kind, part in zip(buffers, (rows.keys, rows.values), strict=True):
        for buffer, x in zip(kind, part, strict=True):
            buffer[slots] = x
    pool = PoolRows(rows.layout, *(tuple(kind) for kind in buffers))
    made = make_codec(codec, pool, rotary, profile)
    block = encode_block(made, 3, slots, position)
    where = some_slots(len(rows), seed=2)
    decode_block(made, 3, block, 0, len(rows), where, target)
    back = Rows(*(tuple(buffer[where] for buffer in kind) for kind in buffers))
    return back, 8 * len(block) / rows.num_values


def relative_error(want: Rows, got: Rows) -> float:
    """Largest of any layer's keys or values: root mean square of the error, in standard deviations."""
    pairs = zip((*want.keys, *want.values), (*got.keys, *got.values), strict=True)
    return max(float((a - b).pow(2).mean().sqrt() / a.std()) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_the_rotary_of_the_model_is_understood(name):
    rotary = make_model(name).rotary(POSITIONS)
    _, _, rotary_dim, is_neox = MODELS[name]
    found = (rotary.rotary_dim, rotary.is_neox) if rotary is not None else (None, False)
    assert found == (rotary_dim, is_neox)


@pytest.mark.parametrize("codec", RMS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_the_model_come_back(name, codec):
    rows = make_model(name).prefill(some_ids(99, 250))
    got, bits = through(name, codec, rows, 0, 0)
    assert relative_error(rows, got) <= RMS[codec]
    assert torch.equal(got.keys[2][:4], rows.keys[2][:4])
    assert bits < (10.5 if codec == "int8" else 5)


@pytest.mark.parametrize("codec", ["int8", "fast", "dense"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gptj"])
def test_rows_go_where_the_model_would_have_put_them(name, codec):
    model, ids = make_model(name), some_ids(98, 200)
    here, there = (model._forward(ids, torch.arange(at, at + 200)) for at in (100, 300))
    got, _ = through(name, codec, here, 100, 300)
    assert relative_error(here, there) > 0.3  # the keys are others
    assert relative_error(there, got) <= RMS[codec]


@pytest.mark.parametrize("codec", ["fast", "dense"])
def test_next_tokens_hardly_change(codec):
    rows, ids = make_model("llama").prefill(some_ids(97, 200)), some_ids(96, 30)
    got, _ = through("llama", codec, rows, 0, 0)
    exact, coded = (make_model("llama").continue_from(x, ids).log_softmax(-1) for x in (rows, got))
    assert float((exact.exp() * (exact - coded)).sum(-1).mean()) < 0.01
