"""The one frozen configuration of the cache; torch-free, validated on construction."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

CODECS = ("raw", "int8", "int4")
PROFILED = ("fast", "dense", "dense-tight", "hadamard")
NEAR_MISS = ("off", "report", "on")
POLICIES = ("value", "lru", "lfu", "slru", "fifo", "filo", "mru", "priority")

_SIZE = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", re.ASCII)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names option, value and remedy."""


def parse_bytes(text: str | int, option: str = "bytes") -> int:
    """``"4GiB"``, ``"0.5 GB"`` or a plain number of bytes; a fraction of a byte is dropped.

    Raises:
        ConfigError: not a size, or one that would be rounded down to nothing.
    """
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if match is None or (unit := match[2].upper()) not in _UNITS:
        raise ConfigError(
            f"{option}={text!r} is not a size; write bytes or a number with a unit, for example 4GiB or 500MB"
        )
    number = Decimal(match[1])
    size = int(number * _UNITS[unit])
    if size == 0 != number:
        raise ConfigError(f"{option}={text!r} is less than one byte; write 0, or a size such as 4GiB or 500MB")
    return size


@dataclasses.dataclass(frozen=True)
class PLTConfig:
    """What ``--plt-*`` options, ``sgl.Engine(plt_*=...)`` keywords and the JSON file of ``--plt-config`` set.

    Attributes:
        codec: how demoted rows are stored: ``raw`` (bit-exact), ``int8``, ``int4``, or with a profile ``fast``,
            ``dense``, ``dense-tight``, ``hadamard``.
        profile: file or directory of profiles; None is where ``sglang-plt calibrate`` puts them.
        predictive_delta: whether such a codec predicts a layer from the one below; off for comparison.
        delta: whether blocks that resemble others are stored as differences from them, with such a codec.
        cold_bytes: budget of the cold tier in bytes, per rank; None takes ``cold_fraction``. 0 switches the tier off.
        cold_fraction: budget as a multiple of the bytes of the KV pool, used when ``cold_bytes`` is None.
        policy: what goes first, in every tier: ``value``, or one of SGLang's own.
        restore_threshold: shorter runs of cold tokens are recomputed instead of restored.
        write_ahead: tokens next in line for eviction that are encoded ahead of need.
        replay_tokens: tokens of evicted prefixes whose keys are kept for their statistics, at 8 bytes each.
        delta_threshold: bits that sequences must share to be a cluster of their own.
        near_miss: ``on`` reuses rows of prompts that are nearly the same, ``report`` says what it would reuse.
        near_miss_override: whether a request may ask for more than ``near_miss``; for less it always may.
        near_miss_recompute: tokens computed behind every difference.
        near_miss_max_difference: largest share of differing tokens in front of and within what is reused.
        layerwise_restore: whether a restore goes on while the forward pass runs, layer by layer; on a GPU only.
        triton: whether rows are encoded (``int8``, ``int4``) and decoded by Triton kernels; on a GPU only.
        decision_log: file that receives one JSON line a decision, ``.tp<rank>`` appended; for comparing ranks.
    """

    codec: str = "int8"
    profile: str | None = None
    predictive_delta: bool = True
    delta: bool = True
    cold_bytes: int | None = None
    cold_fraction: float = 2.0
    policy: str = "value"
    restore_threshold: int = 16
    write_ahead: int = 16384
    replay_tokens: int = 1 << 24
    delta_threshold: float = 14.0
    near_miss: str = "off"
    near_miss_override: bool = False
    near_miss_recompute: int = 16
    near_miss_max_difference: float = 0.02
    layerwise_restore: bool = False
    triton: bool = False
    decision_log: str | None = None

    def __post_init__(self) -> None:
        if self.codec not in (*CODECS, *PROFILED):
            raise ConfigError(f"--plt-codec={self.codec!r} is unknown; choose one of {', '.join((*CODECS, *PROFILED))}")
        if self.profile is not None and not isinstance(self.profile, str):
            raise ConfigError(f"--plt-profile={self.profile!r} must be a path")
        if self.profile is not None and self.codec not in PROFILED:
            raise ConfigError(
                f"--plt-profile={self.profile!r} has no use with --plt-codec={self.codec}; drop it, or choose one of "
                f"{', '.join(PROFILED)}"
            )
        if not isinstance(self.predictive_delta, bool):
            raise ConfigError(f"--plt-predictive-delta={self.predictive_delta!r} must be on or off")
        if not isinstance(self.delta, bool):
            raise ConfigError(f"--plt-delta={self.delta!r} must be on or off")
        if self.cold_bytes is not None:
            self._require_int("cold_bytes", minimum=0)
        if isinstance(self.cold_fraction, bool) or not isinstance(self.cold_fraction, int | float):
            raise ConfigError(f"--plt-cold-fraction={self.cold_fraction!r} must be a number, for example 2.0")
        if not 0 <= self.cold_fraction <= 1000:
            raise ConfigError(
                f"--plt-cold-fraction={self.cold_fraction} must lie in 0..1000: it multiplies the bytes of the KV pool"
            )
        if self.policy not in POLICIES:
            raise ConfigError(f"--plt-policy={self.policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        self._require_int("restore_threshold", minimum=1)
        self._require_int("write_ahead", minimum=0)
        self._require_int("replay_tokens", minimum=0)
        delta = self.delta_threshold
        if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta <= 1024:
            raise ConfigError(f"--plt-delta-threshold={delta!r} must be a number of bits above 0, at most 1024")
        if self.near_miss not in NEAR_MISS:
            raise ConfigError(f"--plt-near-miss={self.near_miss!r} is unknown; choose one of {', '.join(NEAR_MISS)}")
        if not isinstance(self.near_miss_override, bool):
            raise ConfigError(f"--plt-near-miss-override={self.near_miss_override!r} must be on or off")
        self._require_int("near_miss_recompute", minimum=0)
        share = self.near_miss_max_difference
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 0.5:
            raise ConfigError(f"--plt-near-miss-max-difference={share!r} must be a share above 0, at most 0.5")
        if not isinstance(self.triton, bool):
            raise ConfigError(f"--plt-triton={self.triton!r} must be on or off")
        if self.triton and self.codec == "raw":
            raise ConfigError("--plt-triton=on has no use with --plt-codec=raw; drop it, or choose another codec")
        if not isinstance(self.layerwise_restore, bool):
            raise ConfigError(f"--plt-layerwise-restore={self.layerwise_restore!r} must be on or off")
        if self.layerwise_restore and self.may_near_miss:
            raise ConfigError(
                "--plt-layerwise-restore=on cannot be combined with near-miss reuse, which reads rows before they are "
                "restored; switch one of them off"
            )
        if self.decision_log is not None and not isinstance(self.decision_log, str):
            raise ConfigError(f"--plt-decision-log={self.decision_log!r} must be a path")

    def _require_int(self, name: str, *, minimum: int) -> None:
        value = getattr(self, name)
        option = "--plt-" + name.replace("_", "-")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{option}={value!r} must be a whole number")
        if value < minimum:
            raise ConfigError(f"{option}={value} must be at least {minimum}")

    @classmethod
    def from_options(cls, options: dict[str, Any], **defaults: Any) -> PLTConfig:
        """Build from option values; the key ``config`` names a JSON file that the other keys override.

        Args:
            defaults: values of fields that neither names.

        Raises:
            ConfigError: unknown key, wrong value, unreadable file.
        """
        values = dict(options)
        path = values.pop("config", None)
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ConfigError(f"--plt-config={path!r} must be the path of a JSON file")
        merged = {**_read_json(path), **values} if path is not None else values
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(merged) - set(names))
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; the options are {', '.join(names)}")
        if merged.get("cold_bytes") is not None:
            merged["cold_bytes"] = parse_bytes(merged["cold_bytes"], "--plt-cold-bytes")
        return cls(**{**defaults, **merged})

    @property
    def may_near_miss(self) -> bool:
        """Whether any request can be given, or compared with, rows of another prompt."""
        return self.near_miss != "off" or self.near_miss_override

    @property
    def has_cold_tier(self) -> bool:
        """False where a budget of zero switches it off."""
        return self.cold_fraction > 0 if self.cold_bytes is None else self.cold_bytes > 0

    def budget_bytes(self, pool_bytes: int) -> int:
        """Bytes of the cold tier next to a KV pool of ``pool_bytes``."""
        return self.cold_bytes if self.cold_bytes is not None else int(self.cold_fraction * pool_bytes)


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"--plt-config={str(path)!r} cannot be read ({error.strerror}); give the path of a JSON file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--plt-config={str(path)!r} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--plt-config={str(path)!r} must hold one JSON object, got {type(content).__name__}")
    return content
