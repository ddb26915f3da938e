"""The standard library's source files, divided between calibration and evaluation."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

_MIN_CHARS = 2000
_LEFT_OUT = ("site-packages", "dist-packages", "test", "lib2to3")


def library_sources(split: str) -> list[Path]:
    """Sorted; a third is ``evaluation`` and the rest ``calibration``, by the checksum of the relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted((*root.glob("*.py"), *root.glob("[a-z]*/*.py"), *root.glob("[a-z]*/[a-z]*/*.py")))
        if not set(path.relative_to(root).parts) & set(_LEFT_OUT)
        and path.stat().st_size >= _MIN_CHARS
        and (zlib.crc32(path.relative_to(root).as_posix().encode()) % 3 == 0) == (split == "evaluation")
    ]
