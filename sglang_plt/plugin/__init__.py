"""The entry point through which SGLang loads us (group ``sglang.srt.plugins``)."""

from __future__ import annotations

BACKEND = "plt"


def load() -> None:
    """Register the backend ``plt`` and its options; called once in every SGLang process.

    Nothing is imported that a process without a radix cache would not import, and no default path changes: the hooks
    add flags and check them, and only ``--radix-cache plt`` selects the cache.
    """
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_plt.plugin import options
    from sglang_plt.plugin.factory import build_cache

    options.install()
    register_radix_cache_backend(BACKEND, build_cache)
