"""Profile files: round trips, identity, and every way in which a file may be no profile."""

import json
import pickle
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sglang_plt.codec import Profile, ProfileError, ProfileInfo, RowLayout, load_profile
from sglang_plt.codec.profile import PROFILE_FORMAT, QuantisedMatrix, UnitTransform, unit_layers

INFO = ProfileInfo(
    codec="dense",
    model="some-model",
    dtype="bfloat16",
    num_layers=3,
    kv_heads=1,
    head_dim=3,
    v_head_dim=2,
    group=2,
    keys_rotated=False,
    step=0.5,
    scale=0.75,
    tokens=1000,
    sensitivity="fisher",
)


def make_profile(info: ProfileInfo = INFO) -> Profile:
    """Any numbers of the right shapes; powers of two, so that every machine has the same."""
    units = []
    for unit, layers in enumerate(info.units):
        width = len(layers) * info.width
        codes = (torch.arange(width * width).view(width, width) * 37 % 255 - 127).to(torch.int8)
        rows = 2.0 ** -torch.arange(width)
        below = info.width if unit and info.predicts else 0
        weights = QuantisedMatrix(codes[:below].clone(), rows[:below].clone(), rows.clone())
        units.append(UnitTransform(weights, rows * 2 + unit, QuantisedMatrix(codes, rows, 1 + rows)))
    return Profile.make(info, units)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    make_profile().save(tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


def rewrite(file: Path, header: object = None, **tensors: torch.Tensor | None) -> None:
    """Change the header or some tensors of a file; None removes a tensor."""
    held = {name: tensor.clone() for name, tensor in load_file(file).items()} | tensors
    text = json.dumps({"format": PROFILE_FORMAT, **asdict(INFO)} if header is None else header)
    save_file({name: x for name, x in held.items() if x is not None}, file, metadata={"sglang_plt": text})


def refused(file: Path, match: str) -> None:
    with pytest.raises(ProfileError, match=match) as caught:
        load_profile(file)
    assert repr(str(file)) in str(caught.value)
    assert "sglang-plt calibrate" in str(caught.value)


@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_a_file_gives_the_profile_back(tmp_path, group, predicts):
    made = make_profile(replace(INFO, group=group, predicts=predicts))
    made.save(tmp_path / "a")
    read = load_profile(tmp_path / "a")
    assert (read.info, read.id, read.num_bytes) == (made.info, made.id, made.num_bytes)
    for one, other in zip(read.units, made.units, strict=True):
        assert torch.equal(one.bias, other.bias)
        assert torch.equal(one.basis.dense(), other.basis.dense())
        assert torch.equal(one.weights.dense(), other.weights.dense())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # no partial file


def test_identity_is_pinned_and_sees_every_number():
    made = make_profile()
    assert f"{made.id:016x}" == "fc4d5e9c287e47bb"
    assert make_profile().id == made.id
    ids = {made.id, make_profile(replace(INFO, scale=1.0)).id, make_profile(replace(INFO, model="other")).id}
    for unit in (0, 1):
        for matrix in ("weights", "basis"):
            for part in ("codes", "rows", "columns"):
                changed = make_profile()
                tensor = getattr(getattr(changed.units[unit], matrix), part)
                if tensor.numel():
                    tensor.view(-1)[0] += 1
                    ids.add(Profile.make(INFO, changed.units).id)
    assert len(ids) == 3 + 6 + 4


def test_units_cover_the_layers():
    assert unit_layers(5, 2) == [range(0, 2), range(2, 4), range(4, 5)]
    assert unit_layers(2, 3) == [range(0, 2)]
    assert INFO.width == 5


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_matrices_keep_every_number_to_half_a_code(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * sizes
    stored = QuantisedMatrix.of(matrix)
    bound = (0.5 + 1e-4) * stored.columns.double() * stored.rows.double()[:, None]
    assert ((stored.dense().double() - matrix).abs() <= bound).all()
    assert stored.codes.abs().max() <= 127
    assert torch.equal(QuantisedMatrix.of(torch.zeros(rows, columns)).dense(), torch.zeros(rows, columns))


# -- files that are no profile --------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path):
    refused(tmp_path / "nothing.safetensors", "cannot be read")
    refused(tmp_path, "cannot be read")


def test_any_truncation_is_refused(file):
    whole = file.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(file, "cannot be read")
    file.write_bytes(whole + b"\0")
    refused(file, "cannot be read")


@given(st.binary(max_size=200))
def test_garbage_is_refused(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "garbage"
    for bytes_ in (content, struct.pack("<Q", len(content)) + content, struct.pack("<Q", 1 << 62) + content):
        file.write_bytes(bytes_)
        with pytest.raises(ProfileError):
            load_profile(file)


class Bomb:
    """Unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_a_pickle_is_refused_and_not_executed(tmp_path):
    target, file = tmp_path / "executed", tmp_path / "bomb.safetensors"
    file.write_bytes(pickle.dumps(Bomb(target)))
    refused(file, "cannot be read")
    torch.save({"a": Bomb(target)}, file)
    refused(file, "cannot be read")
    assert not target.exists()
    pickle.loads(pickle.dumps(Bomb(target)))
    assert target.exists()  # the bomb works


@pytest.mark.parametrize("text", [None, "", "no json", "[]", "3", "null", '{"format": 2}'])
def test_files_of_others_are_refused(file, text):
    save_file(load_file(file), file, metadata=None if text is None else {"sglang_plt": text})
    refused(file, "not a profile" if text is None else "its header")
    save_file({"a": torch.zeros(1)}, file, metadata={"sglang_plt": json.dumps({"format": PROFILE_FORMAT})})
    refused(file, "missing or unknown fields")


@pytest.mark.parametrize("found", [0, 3, "1", None])
def test_other_formats_are_named(file, found):
    rewrite(file, {**asdict(INFO), "format": found})
    refused(file, f"it is of format {found!r}, this version reads 2")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec", 3),
        ("model", None),
        ("num_layers", 3.0),
        ("num_layers", True),
        ("num_layers", 0),
        ("num_layers", -1),
        ("num_layers", 10**12),
        ("kv_heads", "1"),
        ("head_dim", 0),
        ("head_dim", 10**12),
        ("v_head_dim", -2),
        ("group", 0),
        ("keys_rotated", 1),
        ("step", 0),
        ("step", float("nan")),
        ("step", float("inf")),
        ("step", "0.5"),
        ("scale", -1.0),
        ("scale", 0.0),
        ("tokens", None),
        ("tp_rank", "0"),
    ],
)
def test_bad_header_fields_are_refused(file, field, value):
    rewrite(file, {"format": PROFILE_FORMAT, **asdict(INFO), field: value})
    refused(file, "its header has")


def test_missing_and_unknown_header_fields_are_refused(file):
    rewrite(file, {"format": PROFILE_FORMAT, **asdict(INFO), "extra": 1})
    refused(file, "missing or unknown fields")
    rewrite(file, {"format": PROFILE_FORMAT, **{k: v for k, v in asdict(INFO).items() if k != "tokens"}})
    refused(file, "missing or unknown fields")


def test_missing_and_unknown_tensors_are_named(file):
    rewrite(file, **{"1.bias": None})
    refused(file, r"missing or unknown: 1\.bias")
    rewrite(file, **{"1.bias": torch.zeros(5), "2.bias": torch.zeros(5)})
    refused(file, r"missing or unknown: 2\.bias")


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("0.bias", torch.zeros(10, dtype=torch.float64), r"0\.bias is torch\.float64 \(10,\)"),
        ("0.bias", torch.zeros(1, 10), r"0\.bias is torch\.float32 \(1, 10\), expected torch\.float32 \(10,\)"),
        ("1.basis.codes", torch.zeros(5, 5), r"1\.basis\.codes is torch\.float32"),
        ("1.basis.codes", torch.zeros(5, 4, dtype=torch.int8), r"1\.basis\.codes is torch\.int8 \(5, 4\)"),
        ("1.basis.rows", torch.tensor([1, 1, 1, 1, float("nan")]), r"1\.basis\.rows holds a number that is not finite"),
        ("1.weights.columns", torch.full((5,), float("inf")), r"1\.weights\.columns holds a number"),
    ],
)
def test_tensors_of_another_type_shape_or_value_are_named(file, name, tensor, match):
    rewrite(file, **{name: tensor})
    refused(file, match)


def test_tensors_must_fit_the_header(file):
    for field, value in (("num_layers", 4), ("kv_heads", 2), ("group", 1), ("predicts", False)):
        rewrite(file, {"format": PROFILE_FORMAT, **asdict(INFO), field: value})
        refused(file, r"(missing or unknown|expected torch)")


# -- profiles of other rows -----------------------------------------------------------------------------------------


def test_check_names_the_field_that_differs():
    layout = RowLayout(3, 1, 3, 2, torch.bfloat16)
    INFO.check("dense", layout, "some-model", False)
    for message, arguments in {
        "model='some-model', this model has 'other'": ("dense", layout, "other", False),
        "dtype='bfloat16', this model has 'float16'": (
            "dense", replace(layout, dtype=torch.float16), "some-model", False,
        ),
        "num_layers=3, this model has 4": ("dense", replace(layout, num_layers=4), "some-model", False),
        "kv_heads=1, this model has 2": ("dense", replace(layout, kv_heads=2), "some-model", False),
        "head_dim=3, this model has 5": ("dense", replace(layout, head_dim=5), "some-model", False),
        "v_head_dim=2, this model has 3": ("dense", replace(layout, v_head_dim=3), "some-model", False),
        "keys_rotated=False, this model has True": ("dense", layout, "some-model", True),
        "tp_size=1, this model has 2": ("dense", layout, "some-model", False, 2),
        "tp_rank=0, this model has 1": ("dense", layout, "some-model", False, 1, 1),
        "'dense', this model has 'fast'": ("fast", layout, "some-model", False),
        "'dense', this model has 'dense-flat'": ("dense-flat", layout, "some-model", False),
    }.items():  # fmt: skip
        with pytest.raises(ProfileError, match=message):
            INFO.check(*arguments)
