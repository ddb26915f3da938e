"""Hooks on SGLang: put in place, and seen to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_plt.plugin.seams import seam_error

Hook = tuple[Callable[..., Any], HookType]


def put_in_place(hooks: Mapping[str, Hook]) -> None:
    """Apply ``hooks``, by what they are on; those that are applied already are left alone.

    Raises:
        SeamError: SGLang could not apply one.
    """
    new = [target for target in hooks if target not in HookRegistry._patched]
    for target in new:
        HookRegistry.register(target, *hooks[target])
    if new:
        HookRegistry.apply_hooks()
    check_in_place(hooks)


def check_in_place(targets: Iterable[str]) -> None:
    """See that there is a hook on each of ``targets``; SGLang logs one that fails, and goes on.

    Raises:
        SeamError: there is none on one of them.
    """
    missing = [target for target in targets if target not in HookRegistry._patched]
    if missing:
        raise seam_error(f"{', '.join(missing)} could not be hooked (the log says why)")
