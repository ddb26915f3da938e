"""SGLang on a machine without an accelerator: an out-of-tree platform that needs no compiled CPU kernels.

SGLang's own CPU engine imports operators that no package index carries. This platform runs the same server on plain
torch operators, so that the whole path can be tried and tested anywhere. It is slow, and it steps aside for everything
faster.
"""

from __future__ import annotations

import os

_PLATFORM_CLASS = "sglang_plt.platform.portable_cpu.PortableCpuPlatform"


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``.

    Returns:
        The dotted path of the platform class, or None where an accelerator or SGLang's own CPU engine
        (``SGLANG_USE_CPU_ENGINE=1``) is present.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if torch.accelerator.is_available():
        return None
    return _PLATFORM_CLASS


def install_attention() -> None:
    """Entry point of the group ``sglang.srt.plugins``: on this platform, whatever the cache,
    attention is computed for new tokens only.
    """
    if activate() is None:
        return
    from sglang_plt.platform import attention

    attention.install()
