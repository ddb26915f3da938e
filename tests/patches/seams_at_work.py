"""Does through the patched seams what sglang_plt.plugin does through hooks; run by test_patches.py on a patched SGLang.

No plug-in of ours is loaded here. Prints one JSON object as the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.plugins.server_options import plugin_options, register_server_options
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_plt.config import ConfigError, PLTConfig


def message_of(error: type[BaseException], call: Any, *args: Any, **kwargs: Any) -> str | None:
    try:
        call(*args, **kwargs)
    except error as raised:
        return str(raised)
    return None


def option_strings() -> set[str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option for action in parser._actions for option in action.option_strings}


def server_options(scratch: Path) -> dict[str, Any]:
    before = option_strings()
    untouched = prepare_server_args(["--model-path", "dummy"])

    def add_arguments(group: Any) -> None:
        group.add_argument("--plt-codec", default=argparse.SUPPRESS)
        group.add_argument("--plt-cold-bytes", default=argparse.SUPPRESS, metavar="SIZE", help="Budget.")

    register_server_options("plt", add_arguments)
    record = prepare_server_args(["--model-path", "dummy", "--plt-codec", "int4", "--plt-cold-bytes", "4GiB"])
    config = scratch / "server.yaml"
    config.write_text("model-path: dummy\nplt-codec: int4\nplt-cold-bytes: 5\n")
    from_file = prepare_server_args(["--config", str(config), "--plt-codec", "raw"])
    carried = pickle.loads(pickle.dumps(record))
    context = SimpleNamespace(server_args=carried)  # what a factory gets as TreeCacheBuildContext

    from sglang.srt.entrypoints.engine import Engine

    class Launched(Exception):
        pass

    class Probe(Engine):
        def _launch_subprocesses(self, server_args: Any, **kwargs: Any) -> Any:
            raise Launched(server_args)

    try:
        Probe(model_path="dummy", radix_cache_backend="plt", plt_codec="raw", plt_cold_bytes=7)
    except Launched as launched:
        engine_record = launched.args[0]
    return {
        "added": sorted(option_strings() - before),
        "default_bookkeeping": sorted(name for name in untouched.__dict__ if "plugin" in name),
        "cli": plugin_options(context.server_args, "plt"),
        "cold_bytes": PLTConfig.from_options(plugin_options(context.server_args, "plt")).cold_bytes,
        "none_given": plugin_options(untouched, "plt"),
        "other_plugin": plugin_options(record, "acme"),
        "from_file": plugin_options(from_file, "plt"),
        "engine": plugin_options(engine_record, "plt"),
        "engine_backend": engine_record.radix_cache_backend,
        "engine_call": engine_record.launch_command,
        "twice": message_of(ValueError, register_server_options, "plt", add_arguments),
        "taken": message_of(ValueError, register_server_options, "model", add_arguments),
        "engine_typo": message_of(TypeError, Probe, model_path="dummy", plx_codec="raw"),
    }


def hook_applied() -> dict[str, Any]:
    there = "sglang.srt.utils.common.human_readable_int"
    gone = "sglang.srt.utils.common.no_such_function"
    before = HookRegistry.applied(there)
    for target in (there, gone):
        HookRegistry.register(target, lambda result, *args: None)
    HookRegistry.apply_hooks()
    return {"before": before, "there": HookRegistry.applied(there), "gone": HookRegistry.applied(gone)}


def alias() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.add_argument("--radix-cache-backend-options")  # would make an abbreviation ambiguous
    namespace = parser.parse_args(["--model-path", "dummy", "--radix-cache", "plt"])
    return {"backend": namespace.radix_cache_backend, "default": ServerArgs(model_path="dummy").radix_cache_backend}


def validator(scratch: Path) -> dict[str, Any]:
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    seen = []

    def validate(server_args: Any, cfg: Any) -> None:
        seen.append((server_args.radix_cache_backend, cfg.page_size))
        if cfg.radix_eviction_policy == "lfu":
            raise ConfigError("--radix-eviction-policy=lfu is not served")

    register_radix_cache_backend("plt", lambda context: None, validate=validate)
    register_radix_cache_backend("plain", lambda context: None)

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    (scratch / "config.json").write_text(json.dumps(config))

    def check(*argv: str) -> str | None:
        record = prepare_server_args(["--model-path", str(scratch), "--device", "cpu", *argv])
        record.resolve_once()
        return message_of(ConfigError, record.check_server_args)

    return {
        "unselected": check("--radix-eviction-policy", "lfu"),
        "without": check("--radix-cache-backend", "plain", "--radix-eviction-policy", "lfu"),
        "calls_so_far": len(seen),
        "accepted": check("--radix-cache-backend", "plt"),
        "refused": check("--radix-cache-backend", "plt", "--radix-eviction-policy", "lfu"),
        "seen": [backend for backend, _ in seen],
    }


def main() -> None:
    import sglang

    scratch = Path(sys.argv[1])
    report = {
        "sglang": sglang.__file__,
        "server_options": server_options(scratch),
        "hook_applied": hook_applied(),
        "alias": alias(),
        "validator": validator(scratch),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
