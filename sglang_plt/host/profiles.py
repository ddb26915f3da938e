"""Finds the profile of the model that a server runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from sglang_plt.calibration.identity import default_profile, find_profile, model_identity
from sglang_plt.codec import Profile, ProfileError, ProfileInfo, RowLayout, load_profile

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


_REMEDY = "make it with sglang-plt calibrate, or drop the option"


def profile_info(
    codec: str, layout: RowLayout, keys_rotated: bool, predicts: bool, hidden: int, context: TreeCacheBuildContext
) -> ProfileInfo:
    """What a profile of this server has to be for; step, tokens and sensitivity are still open.

    Args:
        hidden: channels of the token embedding, 0 where there is none.
    """
    return ProfileInfo.open(
        codec,
        _identity(context),
        layout,
        keys_rotated=keys_rotated,
        predicts=predicts,
        hidden=hidden if predicts else 0,
        sensitivity="kind",
        tp_size=context.tp_size,
        tp_rank=context.tp_rank,
    )


def locate_profile(info: ProfileInfo, layout: RowLayout, where: Path | None) -> Profile | None:
    """The profile on disk, or None where there is none.

    Args:
        where: file or directory that the user named; None is the default directory.

    Raises:
        ProfileError: what is there is no profile, or one of another model; or the user named what is not there.
    """
    if where is not None and not where.exists():
        raise ProfileError(f"--plt-profile={str(where)!r} does not exist; {_REMEDY}")
    ranks = (info.tp_size, info.tp_rank)
    file = find_profile(info.kind, info.model, info.dtype, where, *ranks)
    if file is None:
        if where is None:
            return None
        wanted = default_profile(info.model, info.dtype, info.kind, *ranks).name
        raise ProfileError(f"--plt-profile={str(where)!r} holds no {wanted}; {_REMEDY}")
    profile = load_profile(file)
    try:
        profile.info.check(info.kind, layout, info.model, info.keys_rotated, *ranks)
    except ProfileError as error:
        raise ProfileError(f"profile {str(file)!r}: {error}; make one with sglang-plt calibrate") from None
    return profile


def _identity(context: TreeCacheBuildContext) -> str:
    path = Path(context.model_config.model_path)
    if not path.is_dir():
        path = _snapshot(context.model_config.model_path, context.model_config.revision) or path
    try:
        return model_identity(path)
    except (OSError, ValueError):
        config = context.model_config.hf_config
        return f"{config.model_type}-{xxhash.xxh3_64(config.to_json_string()).hexdigest()}"


def _snapshot(name: str, revision: str | None) -> Path | None:
    """Where the hub's client keeps a model that it has fetched."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        return None
