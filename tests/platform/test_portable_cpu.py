"""The out-of-tree CPU platform is there where nothing better is, and steps aside elsewhere."""

from __future__ import annotations

import importlib.metadata
import pkgutil

import pytest
import torch

from sglang_plt.platform import activate

CLASS = "sglang_plt.platform.portable_cpu.PortableCpuPlatform"

needs_no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.fixture(autouse=True)
def no_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


def test_is_an_entry_point():
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.platforms", name="portable_cpu")
    assert entry.load() is activate


@needs_no_accelerator
def test_active_without_an_accelerator():
    assert activate() == CLASS


@needs_no_accelerator
def test_zero_is_no_cpu_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == CLASS


def test_steps_aside_for_the_cpu_engine_of_sglang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_steps_aside_for_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None


def test_platform():
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    platform = pkgutil.resolve_name(CLASS)()
    assert isinstance(platform, SRTPlatform)
    assert platform._enum is PlatformEnum.OOT
    assert platform.device_type == "cpu"
    assert not platform.is_pin_memory_available()
    assert platform.get_default_attention_backend() == "torch_native"
    assert platform.get_dispatch_key_name() == "native"


@needs_no_accelerator
def test_sglang_takes_it():
    from sglang.srt.platforms import current_platform

    assert f"{type(current_platform).__module__}.{type(current_platform).__qualname__}" == CLASS
