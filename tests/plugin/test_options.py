"""``--radix-cache plt`` and ``--plt-*`` on real command lines, in configuration files and as Engine keywords."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_plt.config import CODECS, POLICIES, ConfigError, PLTConfig
from sglang_plt.plugin import options
from sglang_plt.plugin.options import HOOKS, check_hooks, config_of, options_of
from sglang_plt.plugin.refusals import check_flags
from sglang_plt.plugin.seams import SeamError

Parse = Callable[..., Any]
Refusal = Callable[..., str]

EVERY_OPTION = {
    "profile": ("/profiles", "/profiles"),
    "predictive_delta": ("off", False),
    "delta": ("off", False),
    "codec": ("raw", "raw"),
    "cold_bytes": ("4GiB", 4 << 30),
    "cold_fraction": ("0.5", 0.5),
    "policy": ("lfu", "lfu"),
    "restore_threshold": ("7", 7),
    "write_ahead": ("0", 0),
    "replay_tokens": ("9", 9),
    "delta_threshold": ("6.5", 6.5),
    "layerwise_restore": ("on", True),
    "triton": ("on", True),
    "near_miss": ("report", "report"),
    "near_miss_override": ("on", True),
    "near_miss_recompute": ("32", 32),
    "near_miss_max_difference": ("0.01", 0.01),
    "decision_log": ("/tmp/decisions", "/tmp/decisions"),
}
"""Option -> what is written on a command line, and what it means."""


def flag(name: str) -> str:
    return "--plt-" + name.replace("_", "-")


# -- the command line -------------------------------------------------------------------------------------------------


def test_radix_cache_selects_the_backend(parse: Parse):
    assert parse("--radix-cache", "plt").radix_cache_backend == "plt"
    assert parse("--radix-cache=plt").radix_cache_backend == "plt"
    assert parse("--radix-cache-backend", "plt").radix_cache_backend == "plt"


def test_nothing_changes_without_it(parse: Parse):
    record = parse()
    assert record.radix_cache_backend is None
    assert options_of(record) == {}


def test_the_backend_is_registered():
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    from sglang_plt.plugin.factory import build_cache

    assert get_radix_cache_factory("plt") is build_cache


def test_radix_cache_is_exact_and_no_abbreviation():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    # with this one an abbreviation of --radix-cache-backend would be ambiguous
    parser.add_argument("--radix-cache-backend-options")
    namespace = parser.parse_args(["--model-path", "dummy", "--radix-cache", "plt"])
    assert namespace.radix_cache_backend == "plt"


def test_every_field_has_a_flag_and_every_flag_a_field():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {option for action in parser._actions for option in action.option_strings if option.startswith("--plt-")}
    assert flags == {flag(field.name) for field in dataclasses.fields(PLTConfig)} | {"--plt-config"}
    assert set(EVERY_OPTION) == {field.name for field in dataclasses.fields(PLTConfig)}


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_a_flag_sets_its_field(parse: Parse, name: str):
    text, value = EVERY_OPTION[name]
    record = parse("--radix-cache", "plt", "--plt-codec", "dense", flag(name), text)
    assert config_of(record) == dataclasses.replace(PLTConfig(codec="dense"), **{name: value})


def test_defaults(parse: Parse):
    assert config_of(parse("--radix-cache", "plt")) == PLTConfig()


def test_help_shows_our_flags(parse: Parse, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    ours = shown[shown.index("sglang-plt:") :]
    for expected in ("--radix-cache NAME", "--plt-config FILE", "--plt-cold-bytes SIZE", ", ".join(CODECS)):
        assert expected in ours
    assert ", ".join(POLICIES) in " ".join(ours.split())
    for name in EVERY_OPTION:
        assert flag(name) in ours


def test_unknown_flag_is_an_error(parse: Parse, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse("--radix-cache", "plt", "--plt-codecs", "raw")
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("unrecognized arguments: --plt-codecs raw")


@pytest.mark.parametrize("name", ["restore_threshold", "write_ahead", "replay_tokens", "cold_fraction"])
def test_not_a_number_is_an_error_of_argparse(parse: Parse, capsys: pytest.CaptureFixture[str], name: str):
    with pytest.raises(SystemExit) as caught:
        parse("--radix-cache", "plt", flag(name), "many")
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert flag(name) in last
    assert "'many'" in last


@pytest.mark.parametrize(
    ("name", "text", "value", "remedy"),
    [
        ("codec", "nonsense", "'nonsense'", "choose one of raw, int8, int4"),
        ("policy", "nonsense", "'nonsense'", "choose one of value, lru, lfu, slru, fifo, filo, mru, priority"),
        ("policy", "tlru", "'tlru'", "choose one of value, lru"),
        ("cold_bytes", "-1", "-1", "at least 0"),
        ("cold_bytes", "-1GiB", "-1073741824", "at least 0"),
        ("cold_bytes", "4 GIGS", "'4 GIGS'", "for example 4GiB or 500MB"),
        ("cold_bytes", "true", "'true'", "for example 4GiB or 500MB"),
        ("cold_bytes", "nan", "'nan'", "for example 4GiB or 500MB"),
        ("cold_bytes", "0.5", "'0.5'", "write 0"),
        ("cold_fraction", "nan", "nan", "must lie in 0..1000"),
        ("cold_fraction", "inf", "inf", "must lie in 0..1000"),
        ("cold_fraction", "-0.1", "-0.1", "must lie in 0..1000"),
        ("restore_threshold", "0", "0", "at least 1"),
        ("write_ahead", "-1", "-1", "at least 0"),
        ("replay_tokens", "-1", "-1", "at least 0"),
    ],
)
def test_wrong_value_names_flag_value_and_remedy(refusal: Refusal, name: str, text: str, value: str, remedy: str):
    message = refusal("--radix-cache", "plt", f"{flag(name)}={text}")
    assert message.startswith(f"{flag(name)}={value} ")
    assert remedy in message


@pytest.mark.parametrize("other", [(), ("--radix-cache", "flexkv")])
def test_options_without_the_cache_are_refused(refusal: Refusal, other: tuple[str, ...]):
    message = refusal("--plt-codec", "raw", "--plt-cold-bytes", "1GiB", *other)
    assert message == "--plt-codec, --plt-cold-bytes given without --radix-cache plt; add it, or drop the options"


# -- one policy out of two flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "policy"),
    [
        ((), "value"),
        (("--plt-policy", "value"), "value"),
        (("--plt-policy", "mru"), "mru"),
        (("--radix-eviction-policy", "lfu"), "lfu"),
        (("--radix-eviction-policy", "lru"), "lru"),
        (("--radix-eviction-policy", "slru", "--plt-policy", "slru"), "slru"),
        (("--radix-eviction-policy=lru", "--plt-policy=lru"), "lru"),
    ],
)
def test_the_policy_that_is_given(parse: Parse, argv: tuple[str, ...], policy: str):
    record = parse("--radix-cache", "plt", *argv)
    assert config_of(record).policy == policy
    assert config_of(pickle.loads(pickle.dumps(record))).policy == policy


@pytest.mark.parametrize(("ours", "theirs"), [("value", "lfu"), ("value", "lru"), ("lru", "priority")])
def test_policies_that_contradict_each_other(refusal: Refusal, ours: str, theirs: str):
    message = refusal("--radix-cache", "plt", "--plt-policy", ours, "--radix-eviction-policy", theirs)
    assert message == (
        f"--plt-policy={ours} and --radix-eviction-policy={theirs} contradict each other; drop one of them"
    )


def test_tlru_is_refused_whatever_our_policy_is(parse: Parse):
    for argv in ((), ("--plt-policy", "value")):
        record = parse("--radix-cache", "plt", "--radix-eviction-policy", "tlru", *argv)
        with pytest.raises(SystemExit, match="--radix-eviction-policy='tlru': choose one of lru, "):
            record.check_server_args()


def test_the_policy_of_a_file_counts_as_given(parse: Parse, refusal: Refusal, tmp_path: Path):
    path = tmp_path / "plt.json"
    path.write_text('{"policy": "filo"}')
    argv = ("--radix-cache", "plt", "--plt-config", str(path))
    assert config_of(parse(*argv)).policy == "filo"
    assert config_of(parse(*argv, "--plt-policy", "lfu", "--radix-eviction-policy", "lfu")).policy == "lfu"
    assert "--plt-policy=filo and --radix-eviction-policy=lfu" in refusal(*argv, "--radix-eviction-policy", "lfu")


def test_a_policy_in_a_yaml_file_of_sglang(parse: Parse, tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("radix-cache: plt\nradix-eviction-policy: lru\n")
    assert config_of(parse("--config", str(path))).policy == "lru"
    path.write_text("radix-cache: plt\nplt-policy: lfu\n")
    assert config_of(parse("--config", str(path))).policy == "lfu"


def test_what_a_model_prefers_is_no_statement(parse: Parse):
    """SGLang sets another policy for some models; nobody asked for it."""
    record = parse("--radix-cache", "plt")
    record._resolved_overrides = [("a model's defaults", {"radix_eviction_policy": "priority"})]
    assert config_of(record).policy == "value"


def test_options_of_slru(parse: Parse):
    threshold = ("--radix-eviction-policy-config", '{"protected_threshold": 4}')
    for flag_of_slru in ("--plt-policy", "--radix-eviction-policy"):
        record = parse("--radix-cache", "plt", flag_of_slru, "slru", *threshold)
        check_flags(record, config_of(record))
    for argv in (threshold, ("--plt-policy", "lfu", *threshold)):
        record = parse("--radix-cache", "plt", *argv)
        with pytest.raises(ConfigError, match=r"--radix-eviction-policy-config=.* does not fit the policy .*--plt-pol"):
            check_flags(record, config_of(record))


# -- files ------------------------------------------------------------------------------------------------------------


def test_flags_override_the_json_file(parse: Parse, tmp_path: Path):
    path = tmp_path / "plt.json"
    path.write_text(json.dumps({"codec": "raw", "cold_bytes": "1GiB", "write_ahead": 5}))
    config = config_of(parse("--radix-cache", "plt", "--plt-codec", "int4", "--plt-config", str(path)))
    assert config == PLTConfig(codec="int4", cold_bytes=1 << 30, write_ahead=5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"kodec": "raw"}', "unknown option kodec; the options are codec, profile, "),
        ('{"config": "other.json"}', "unknown option config; the options are "),
        ('{"cold_fraction": NaN}', "--plt-cold-fraction=nan must lie in 0..1000"),
        ('{"cold_fraction": true}', "--plt-cold-fraction=True must be a number"),
        ('{"write_ahead": true}', "--plt-write-ahead=True must be a whole number"),
        ('{"cold_bytes": true}', "--plt-cold-bytes=True is not a size"),
        ('{"cold_bytes": 1.5}', "--plt-cold-bytes=1.5 is not a size"),
        ('{"decision_log": 3}', "--plt-decision-log=3 must be a path"),
        ("[]", "must hold one JSON object, got list"),
        ("{codec: raw}", "is not JSON"),
        (None, "cannot be read (No such file or directory); give the path of a JSON file"),
    ],
)
def test_wrong_json_file(refusal: Refusal, tmp_path: Path, content: str | None, expected: str):
    path = tmp_path / "plt.json"
    if content is not None:
        path.write_text(content)
    assert expected in refusal("--radix-cache", "plt", "--plt-config", str(path))


def test_yaml_config_file_of_sglang(parse: Parse, tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("radix-cache: plt\nplt-codec: int4\nplt-cold-bytes: 1GiB\nplt-write-ahead: 5\n")
    record = parse("--config", str(path), "--plt-codec", "raw")
    assert record.radix_cache_backend == "plt"
    assert config_of(record) == PLTConfig(codec="raw", cold_bytes=1 << 30, write_ahead=5)


def test_wrong_value_in_a_yaml_config_file(refusal: Refusal, tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("radix-cache: plt\nplt-cold-bytes: true\n")
    assert "--plt-cold-bytes='true' is not a size" in refusal("--config", str(path))


# -- the record -------------------------------------------------------------------------------------------------------


def test_options_survive_pickling(parse: Parse):
    record = parse("--radix-cache", "plt", "--plt-codec", "int4", "--plt-cold-bytes", "3MB")
    carried = pickle.loads(pickle.dumps(record))
    assert config_of(carried) == config_of(record) == PLTConfig(codec="int4", cold_bytes=3_000_000)


def test_a_command_line_ends_with_one_line_at_the_late_check_too(parse: Parse):
    record = parse("--radix-cache", "plt", "--disable-radix-cache")
    with pytest.raises(SystemExit, match=r"sglang-plt: error: .*--disable-radix-cache=True") as caught:
        record.check_server_args()
    assert isinstance(caught.value.__cause__, ConfigError)


# -- sgl.Engine -------------------------------------------------------------------------------------------------------


def engine_record(**kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    return Engine.server_args_class(model_path="dummy", **kwargs)


def test_engine_takes_keywords():
    from sglang.srt.server_args import ServerArgs

    record = engine_record(radix_cache_backend="plt", plt_codec="raw", plt_cold_bytes="2KiB", plt_write_ahead=3)
    assert isinstance(record, ServerArgs)
    assert config_of(pickle.loads(pickle.dumps(record))) == PLTConfig(codec="raw", cold_bytes=2048, write_ahead=3)


def test_engine_without_keywords_is_unchanged():
    from sglang.srt.server_args import ServerArgs

    record = engine_record()
    assert options_of(record) == {}
    assert repr(record) == repr(ServerArgs(model_path="dummy"))


def test_engine_reads_the_json_file(tmp_path: Path):
    path = tmp_path / "plt.json"
    path.write_text('{"codec": "raw"}')
    assert config_of(engine_record(radix_cache_backend="plt", plt_config=path)).codec == "raw"


def test_engine_keywords_name_the_policy():
    def policy(**kwargs: Any) -> str:
        return config_of(pickle.loads(pickle.dumps(engine_record(radix_cache_backend="plt", **kwargs)))).policy

    assert policy() == "value"
    assert policy(plt_policy="fifo") == "fifo"
    assert policy(radix_eviction_policy="lru") == "lru"
    assert policy(radix_eviction_policy="mru") == "mru"
    with pytest.raises(ConfigError, match="--plt-policy=value and --radix-eviction-policy=lru contradict"):
        policy(plt_policy="value", radix_eviction_policy="lru")


def test_engine_notes_nothing_for_other_caches():
    assert not engine_record(radix_eviction_policy="lru")._radix_eviction_policy_explicitly_set


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"plt_codec": "nonsense"}, "--plt-codec='nonsense' is unknown"),
        ({"plt_kodec": "raw"}, "unknown option kodec; the options are codec, "),
        ({"plt_policy": "LRU"}, "--plt-policy='LRU' is unknown"),
        ({"plt_write_ahead": "5"}, "--plt-write-ahead='5' must be a whole number"),
        ({"plt_write_ahead": True}, "--plt-write-ahead=True must be a whole number"),
        ({"plt_cold_fraction": float("nan")}, "--plt-cold-fraction=nan must lie in 0..1000"),
        ({"plt_config": {"codec": "raw"}}, "--plt-config={'codec': 'raw'} must be the path of a JSON file"),
    ],
)
def test_engine_refuses_at_once(kwargs: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as caught:
        engine_record(radix_cache_backend="plt", **kwargs)
    assert expected in str(caught.value)


def test_engine_refuses_options_without_the_cache():
    with pytest.raises(ConfigError, match="--plt-codec given without --radix-cache plt"):
        engine_record(plt_codec="raw")


def test_engine_is_not_hooked_twice():
    from sglang.srt.entrypoints.engine import Engine

    before = Engine.server_args_class
    options.hook_engine()
    assert Engine.server_args_class is before


def test_engine_refuses_flags_with_an_exception():
    record = engine_record(radix_cache_backend="plt", disable_radix_cache=True)
    with pytest.raises(ConfigError, match="--disable-radix-cache=True"):
        record.check_server_args()


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_are_in_place():
    check_hooks()


def test_a_hook_that_failed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options, "HOOKS", (*HOOKS, "sglang.srt.server_args.ServerArgs.no_such_method"))
    with pytest.raises(SeamError, match=r"ServerArgs\.no_such_method could not be hooked.*install sglang=="):
        check_hooks()
