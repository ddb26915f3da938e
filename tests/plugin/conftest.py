"""One load of the plug-in for all tests of this folder: importing SGLang takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from sglang_plt.config import ConfigError


@pytest.fixture(scope="session", autouse=True)
def plugin_loaded() -> None:
    """Load plug-ins as SGLang's entry points do."""
    import sglang.srt.entrypoints.engine  # noqa: F401
    from sglang.srt.plugins import load_plugins

    from sglang_plt.plugin.options import hook_engine

    load_plugins()
    hook_engine()  # another test may have loaded the plug-ins before the engine was imported


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``parse("--radix-cache", "plt", ...)``: the record of that command line."""
    from sglang.srt.server_args import prepare_server_args

    # it replaces the handlers of the root logger, pytest's among them
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    return lambda *argv: prepare_server_args(["--model-path", "dummy", *argv])


@pytest.fixture
def refusal(parse: Callable[..., Any]) -> Callable[..., str]:
    """``refusal(...)``: the message with which that command line ends, which must be all that the user sees."""

    def call(*argv: str) -> str:
        with pytest.raises(SystemExit) as caught:
            parse(*argv)
        assert isinstance(caught.value.__cause__, ConfigError)
        assert caught.value.code == f"sglang-plt: error: {caught.value.__cause__}"
        assert "\n" not in caught.value.code
        return str(caught.value.__cause__)

    return call
