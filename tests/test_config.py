"""PLTConfig: what it takes, what it refuses, and with which words."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt import codec
from sglang_plt.config import CODECS, POLICIES, ConfigError, PLTConfig, parse_bytes
from sglang_plt.policy import EVICTION_POLICIES

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "B": 1, "": 1}


# -- parse_bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        (" 1.5KiB ", 1536),
        ("0.1KB", 100),
        ("1.0005KB", 1000),
        ("9007199254740993", 2**53 + 1),
        ("007", 7),
        ("0", 0),
        ("0.0GiB", 0),
        ("-1", -1),
        (12, 12),
    ],
)
def test_parse_bytes(text: str | int, expected: int):
    assert parse_bytes(text) == expected


@given(st.integers(0, 2**60), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_whole_sizes_are_exact(number: int, unit: str, space: str):
    assert parse_bytes(f"{number}{space}{unit.swapcase()}") == number * UNITS[unit]


@given(st.decimals(min_value=1, max_value=10**6, places=3), st.sampled_from(sorted(UNITS)))
def test_fractions_lose_less_than_a_byte(number: Decimal, unit: str):
    exact = number * UNITS[unit]
    assert 0 <= exact - parse_bytes(f"{number}{unit}") < 1


NOT_SIZES = ["", " ", "GiB", "4GiB2", "4 4GB", "4TiBs", "4 XB", "1e9", "1_000", "0x10", "½GB", "٣", "4,5GB", "4GiB\n5"]


@pytest.mark.parametrize("text", [*NOT_SIZES, "nan", "inf", "-inf", True, False, 1.5, None, [1]])
def test_not_a_size(text: Any):
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, "--plt-cold-bytes")
    assert str(caught.value).startswith(f"--plt-cold-bytes={text!r} is not a size; write ")


@given(st.text())
def test_any_text_is_a_size_or_refused(text: str):
    try:
        size = parse_bytes(text)
    except ConfigError as error:
        message = str(error)
    else:
        message = repr(text) if isinstance(size, int) else ""
    assert repr(text) in message


@pytest.mark.parametrize("text", ["0.5", "0.0001KiB", "-0.5"])
def test_a_size_does_not_vanish(text: str):
    """Zero bytes switches the cold tier off, which must have been meant."""
    with pytest.raises(ConfigError, match="less than one byte; write 0, or a size"):
        parse_bytes(text)


# -- PLTConfig --------------------------------------------------------------------------------------------------------


def test_defaults_are_valid_and_frozen():
    config = PLTConfig()
    assert PLTConfig.from_options({}) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.codec = "raw"  # type: ignore[misc]


def test_codecs_are_those_of_the_codec_package():
    assert tuple(codec.CODECS) == CODECS
    assert PLTConfig().codec in CODECS


def test_policies_are_those_that_can_be_made():
    assert set(POLICIES) == {"value", *EVICTION_POLICIES}
    assert PLTConfig().policy == POLICIES[0] == "value"


def test_defaults_give_way_to_options(tmp_path: Path):
    path = tmp_path / "plt.json"
    path.write_text('{"policy": "lfu"}')
    assert PLTConfig.from_options({}, policy="mru").policy == "mru"
    assert PLTConfig.from_options({"config": path}, policy="mru").policy == "lfu"
    assert PLTConfig.from_options({"config": path, "policy": "lru"}, policy="mru").policy == "lru"


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("codec", "INT8", "choose one of raw, int8, int4"),
        ("codec", None, "choose one of raw, int8, int4"),
        ("codec", ["raw"], "choose one of raw, int8, int4"),
        ("policy", "VALUE", "choose one of value, lru, lfu"),
        ("policy", None, "choose one of value, lru, lfu"),
        ("policy", ["lru"], "choose one of value, lru, lfu"),
        ("cold_bytes", -1, "must be at least 0"),
        ("cold_bytes", 1.0, "must be a whole number"),
        ("cold_bytes", False, "must be a whole number"),
        ("cold_fraction", math.nan, "must lie in 0..1000"),
        ("cold_fraction", math.inf, "must lie in 0..1000"),
        ("cold_fraction", -math.inf, "must lie in 0..1000"),
        ("cold_fraction", -0.001, "must lie in 0..1000"),
        ("cold_fraction", 1000.5, "must lie in 0..1000"),
        ("cold_fraction", "2", "must be a number, for example 2.0"),
        ("cold_fraction", True, "must be a number, for example 2.0"),
        ("cold_fraction", None, "must be a number, for example 2.0"),
        ("restore_threshold", 0, "must be at least 1"),
        ("restore_threshold", True, "must be a whole number"),
        ("restore_threshold", None, "must be a whole number"),
        ("write_ahead", -1, "must be at least 0"),
        ("write_ahead", 1.5, "must be a whole number"),
        ("replay_tokens", -1, "must be at least 0"),
        ("replay_tokens", "many", "must be a whole number"),
        ("layerwise_restore", "maybe", "must be on or off"),
        ("triton", 1, "must be on or off"),
        ("near_miss", "maybe", "choose one of off, report, on"),
        ("near_miss_override", "perhaps", "must be on or off"),
        ("near_miss_recompute", -1, "must be at least 0"),
        ("near_miss_max_difference", 0.9, "must be a share above 0, at most 0.5"),
        ("near_miss_max_difference", "some", "must be a share above 0, at most 0.5"),
        ("decision_log", 1, "must be a path"),
    ],
)
def test_wrong_value_names_option_value_and_remedy(field: str, value: Any, remedy: str):
    with pytest.raises(ConfigError) as caught:
        PLTConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"--plt-{field.replace('_', '-')}={value!r} ")
    assert remedy in message


@pytest.mark.parametrize("near_miss", [{"near_miss": "report"}, {"near_miss_override": True}])
def test_layerwise_restore_goes_without_near_miss_reuse(near_miss: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"--plt-layerwise-restore=on cannot be combined with near-miss.*switch one"):
        PLTConfig(layerwise_restore=True, **near_miss)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cold_bytes", 0),
        ("cold_fraction", 0),
        ("cold_fraction", 1000),
        ("restore_threshold", 1),
        ("write_ahead", 0),
        ("replay_tokens", 0),
    ],
)
def test_bounds_are_allowed(field: str, value: Any):
    assert getattr(PLTConfig(**{field: value}), field) == value


options = st.fixed_dictionaries(
    {},
    optional={
        "codec": st.sampled_from(CODECS),
        "policy": st.sampled_from(POLICIES),
        "cold_bytes": st.none() | st.integers(0, 2**50),
        "cold_fraction": st.floats(0, 1000),
        "restore_threshold": st.integers(1, 10**6),
        "write_ahead": st.integers(0, 10**6),
        "replay_tokens": st.integers(0, 10**9),
        "decision_log": st.none() | st.text(),
    },
)


@pytest.fixture(scope="module")
def options_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "plt.json"


@given(in_file=options, given_options=options)
def test_given_options_override_the_file(options_file: Path, in_file: dict, given_options: dict):
    options_file.write_text(json.dumps(in_file))
    config = PLTConfig.from_options({**given_options, "config": options_file})
    assert config == PLTConfig(**{**in_file, **given_options})
    assert pickle.loads(pickle.dumps(config)) == config


def test_from_options_does_not_change_its_argument(tmp_path: Path):
    path = tmp_path / "plt.json"
    path.write_text("{}")
    given_options = {"config": str(path), "cold_bytes": "1KiB"}
    before = dict(given_options)
    assert PLTConfig.from_options(given_options).cold_bytes == 1024
    assert given_options == before


def test_unknown_options_are_listed_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        PLTConfig.from_options({"zip": 1, "kodec": "raw", "codec": "raw"})
    names = ", ".join(field.name for field in dataclasses.fields(PLTConfig))
    assert str(caught.value) == f"unknown option kodec, zip; the options are {names}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not JSON"),
        (b"codec: raw", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"null", "must hold one JSON object, got NoneType"),
        (b'"raw"', "must hold one JSON object, got str"),
    ],
)
def test_unreadable_file(tmp_path: Path, content: bytes, expected: str):
    path = tmp_path / "plt.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        PLTConfig.from_options({"config": str(path)})
    assert str(caught.value).startswith(f"--plt-config={str(path)!r} {expected}")


def test_missing_file_and_folder(tmp_path: Path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match=r"--plt-config='.*' cannot be read \(.+\); give the path of a JSON file"):
            PLTConfig.from_options({"config": path})


@pytest.mark.parametrize("path", [3, {"codec": "raw"}, ["a"]])
def test_config_must_be_a_path(path: Any):
    with pytest.raises(ConfigError, match="must be the path of a JSON file"):
        PLTConfig.from_options({"config": path})


@given(st.integers(0, 2**45), st.floats(0, 1000), st.none() | st.integers(0, 2**45))
def test_budget(pool_bytes: int, fraction: float, cold_bytes: int | None):
    budget = PLTConfig(cold_bytes=cold_bytes, cold_fraction=fraction).budget_bytes(pool_bytes)
    assert budget == (cold_bytes if cold_bytes is not None else int(fraction * pool_bytes))


def test_triton_kernels_are_of_all_codecs_but_raw():
    with pytest.raises(ConfigError, match=r"--plt-triton=on has no use with --plt-codec=raw; drop it"):
        PLTConfig(triton=True, codec="raw")
    assert PLTConfig(triton=True, codec="dense").triton
