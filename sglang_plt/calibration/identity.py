"""Names a model by what its KV depends on, so that a profile finds its model again wherever both lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

_IGNORED = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "use_cache",
    "bos_token_id",
)
_SAMPLE = 1 << 16  # bytes read at both ends of a weight file


def model_identity(path: Path) -> str:
    """``<model type>-<16 hex digits>`` of a model directory: its configuration, names, sizes and ends of its weights.

    Raises:
        OSError: there is no readable ``config.json`` or weight file.
        ValueError: ``config.json`` is not a JSON object.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} does not hold one JSON object")
    kept = {name: value for name, value in config.items() if name not in _IGNORED}
    digest = xxhash.xxh3_64(json.dumps(kept, sort_keys=True).encode())
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLE))
            content.seek(max(0, size - _SAMPLE))
            digest.update(content.read(_SAMPLE))
    return f"{config.get('model_type', 'model')}-{digest.hexdigest()}"


def profile_directory() -> Path:
    """Where profiles are looked for and kept: ``$SGLANG_PLT_PROFILES``, else ``sglang-plt`` in the user's cache."""
    given = os.environ.get("SGLANG_PLT_PROFILES")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-plt" / "profiles"


def default_profile(identity: str, dtype: str, codec: str, tp_size: int = 1, tp_rank: int = 0) -> Path:
    """The file of a model's profile in :func:`profile_directory`."""
    rank = f".tp{tp_rank}of{tp_size}" if tp_size > 1 else ""
    return profile_directory() / f"{identity}-{dtype}{rank}.{codec}.safetensors"


def find_profile(
    codec: str, identity: str, dtype: str, where: Path | None = None, tp_size: int = 1, tp_rank: int = 0
) -> Path | None:
    """A profile that is there: the file ``where``, or the model's in the directory ``where`` or the default one."""
    if where is not None and where.is_file():
        return where
    file = default_profile(identity, dtype, codec, tp_size, tp_rank)
    if where is not None:
        file = where / file.name
    return file if file.is_file() else None
