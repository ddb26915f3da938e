"""Every flag and model that this cache does not serve is refused, with the flag, its value and the remedy."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_plt.config import ConfigError, PLTConfig
from sglang_plt.plugin import refusals
from sglang_plt.plugin.refusals import REFUSALS, Refusal, check_flags, check_model
from sglang_plt.plugin.seams import SeamError
from sglang_plt.policy import EVICTION_POLICIES

REFUSED = {
    "disable_radix_cache": True,
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "enable_flexkv": True,
    "enable_unified_cache_external_linker": True,
    "enable_streaming_session": True,
    "enable_session_radix_cache": True,
    "enable_kv_cache_sharding": True,
    "enable_unified_memory": True,
    "enable_page_major_kv_layout": True,
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "disaggregation_mode": "prefill",
    "dllm_algorithm": "LowConfidence",
    "speculative_algorithm": "EAGLE",
    "radix_eviction_policy": "tlru",
}
ALLOWED = {"pp_size": 1, "dcp_size": 1, "attn_cp_size": 1, "disaggregation_mode": "null"}
"""What passes, where it is not False or None."""

NO_COLD_TIER = [PLTConfig(cold_bytes=0), PLTConfig(cold_fraction=0.0)]
COLD_TIER = [PLTConfig(), PLTConfig(cold_bytes=1), PLTConfig(cold_bytes=1, cold_fraction=0.0)]

each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)


def record(**kwargs: Any) -> ServerArgs:
    return ServerArgs(model_path="dummy", radix_cache_backend="plt", **kwargs)


def test_every_refusal_has_a_value_here():
    assert [refusal.field for refusal in REFUSALS] == list(REFUSED)


@each_refusal
def test_refused_value(refusal: Refusal):
    value = REFUSED[refusal.field]
    with pytest.raises(ConfigError) as caught:
        check_flags(record(**{refusal.field: value}), PLTConfig())
    assert str(caught.value) == f"--radix-cache plt cannot be combined with {refusal.flag}={value!r}: {refusal.reason}"


@each_refusal
def test_allowed_value(refusal: Refusal):
    boolean = isinstance(REFUSED[refusal.field], bool)
    if refusal.field == "radix_eviction_policy":
        allowed = EVICTION_POLICIES
    else:
        allowed = (ALLOWED.get(refusal.field, False if boolean else None),)
    for value in allowed:
        check_flags(record(**{refusal.field: value}), PLTConfig())


@each_refusal
def test_flag_is_one_of_sglang(refusal: Refusal):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    assert refusal.flag in flags


@each_refusal
def test_only_a_cold_tier_excludes_what_only_it_cannot_serve(refusal: Refusal):
    server_args = record(**{refusal.field: REFUSED[refusal.field]})
    for config in COLD_TIER:
        with pytest.raises(ConfigError):
            check_flags(server_args, config)
    for config in NO_COLD_TIER:
        if refusal.cold_only:
            check_flags(server_args, config)
        else:
            with pytest.raises(ConfigError):
                check_flags(server_args, config)


def test_reasons_say_what_to_do():
    remedies = ("drop", "use ", "set ", "choose ")
    for refusal in REFUSALS:
        assert any(remedy in refusal.reason for remedy in remedies), refusal


def test_defaults_pass():
    check_flags(record(), PLTConfig())


def test_resolved_values_are_read():
    """What resolution decided counts, not what was written."""
    server_args = record()
    server_args._resolved_overrides = [("a model's defaults", {"disable_radix_cache": True})]
    with pytest.raises(ConfigError, match="--disable-radix-cache=True"):
        check_flags(server_args, PLTConfig())


def test_a_field_that_sglang_no_longer_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refusals, "REFUSALS", (Refusal("no_such_field", bool, "drop it"),))
    with pytest.raises(SeamError, match=r"ServerArgs\.no_such_field \(--no-such-field\) is missing; install sglang=="):
        check_flags(record(), PLTConfig())


MODELS = {
    "is_hybrid_swa": "sliding-window attention",
    "is_hybrid_ssm": "Mamba or linear-attention state",
    "is_dsa": "a sparse-attention index",
}


def context(**kwargs: bool) -> Any:
    return SimpleNamespace(**{**dict.fromkeys(MODELS, False), **kwargs})


@pytest.mark.parametrize("field", MODELS)
def test_models_that_keep_more_than_rows(field: str):
    with pytest.raises(ConfigError) as caught:
        check_model(context(**{field: True}))
    assert str(caught.value) == (
        f"--radix-cache plt does not serve models with {MODELS[field]}; start this model without --radix-cache plt"
    )


def test_plain_model_passes():
    check_model(context())
