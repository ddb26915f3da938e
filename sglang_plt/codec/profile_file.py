"""Reads profile files, and refuses whatever is none."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang_plt.codec.profile import (
    KEY,
    PROFILE_FORMAT,
    Profile,
    ProfileError,
    ProfileInfo,
    QuantisedMatrix,
    UnitTransform,
)

_MOST = 1 << 16  # of any size in the header
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and validate a profile.

    Raises:
        ProfileError: the file is missing, truncated, of another version, or not a profile.
    """
    try:
        with safe_open(path, framework="pt") as file:
            info = _parse_info((file.metadata() or {}).get(KEY))
            expected = _expected_tensors(info)
            if set(file.keys()) != set(expected):
                odd = sorted(set(file.keys()) ^ set(expected))
                raise ProfileError(f"tensors are missing or unknown: {', '.join(odd[:3])}")
            tensors = {}
            for name, (dtype, shape) in expected.items():
                tensor = file.get_tensor(name)
                if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                    raise ProfileError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
                if dtype == torch.float32 and not bool(tensor.isfinite().all()):
                    raise ProfileError(f"{name} holds a number that is not finite")
                tensors[name] = tensor
    except ProfileError as error:
        raise ProfileError(f"profile {str(path)!r}: {error}; make it again with sglang-plt calibrate") from None
    except (OSError, SafetensorError) as error:
        raise ProfileError(
            f"profile {str(path)!r} cannot be read ({error}); make it with sglang-plt calibrate"
        ) from None
    units = [
        UnitTransform(_matrix(tensors, unit, "weights"), tensors[f"{unit}.bias"], _matrix(tensors, unit, "basis"))
        for unit in range(len(info.units))
    ]
    return Profile.make(info, units)


def _matrix(tensors: dict[str, torch.Tensor], unit: int, name: str) -> QuantisedMatrix:
    return QuantisedMatrix(*(tensors[f"{unit}.{name}.{part}"] for part in ("codes", "rows", "columns")))


def _expected_tensors(info: ProfileInfo) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for number, unit in enumerate(info.units):
        width = len(unit) * info.width
        found[f"{number}.bias"] = (torch.float32, (width,))
        for name, rows in (("weights", info.inputs_of(unit)), ("basis", width)):
            found[f"{number}.{name}.codes"] = (torch.int8, (rows, width))
            found[f"{number}.{name}.rows"] = (torch.float32, (rows,))
            found[f"{number}.{name}.columns"] = (torch.float32, (width,))
    return found


def _parse_info(text: str | None) -> ProfileInfo:
    if text is None:
        raise ProfileError("it is a safetensors file, but not a profile")
    try:
        header: dict[str, Any] = json.loads(text)
        found = header.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ProfileError("its header is not readable") from None
    if found != PROFILE_FORMAT:
        raise ProfileError(f"it is of format {found!r}, this version reads {PROFILE_FORMAT}")
    try:
        info = ProfileInfo(**header)
    except TypeError:
        raise ProfileError("its header has missing or unknown fields") from None
    for name, kind in ProfileInfo.__annotations__.items():
        value, expected = getattr(info, name), _KINDS[kind]
        if not isinstance(value, expected) or (kind != "bool" and isinstance(value, bool)):
            raise ProfileError(f"its header has {name}={value!r}")
    sizes = (info.num_layers, info.kv_heads, info.head_dim, info.group)
    more = (info.v_head_dim, info.hidden, info.token_layers)
    in_range = min(sizes) >= 1 and min(more) >= 0 and max(*sizes, *more) <= _MOST
    if not in_range or not (0 < info.step < 1e6 and 1e-3 < info.scale < 1e3):
        raise ProfileError("its header has a size or step that is out of range")
    return info
