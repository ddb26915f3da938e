"""The sides of a comparison: names -> flags of ``sglang.launch_server``, at equal slots and at equal bytes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from sglang_plt.config import CODECS, POLICIES, PROFILED
from sglang_plt.serving import CALM_THREADS, ServerProcess

SGLANG_POLICIES = ("lru", "lfu", "slru", "fifo", "filo", "mru", "priority")
_DELTA = "+delta"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to cache.

    Attributes:
        name: ``default`` (SGLang's radix cache), ``sglang-<policy>``, ``plt-<codec>``, ``plt-<codec>-<policy>``, and
            with ``+delta`` behind the codec, near-duplicates stored as differences.
        codec: of this package's cache; None for SGLang's.
        policy: None leaves the default.
        delta: whether near-duplicates are stored as differences.
    """

    name: str
    codec: str | None = None
    policy: str | None = None
    delta: bool = False

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm called ``name``.

        Raises:
            ValueError: there is none.
        """
        if name == "default":
            return cls(name)
        family, _, rest = name.partition("-")
        if family == "sglang" and rest in SGLANG_POLICIES:
            return cls(name, policy=rest)
        if family == "plt":
            for codec in sorted((*CODECS, *PROFILED), key=len, reverse=True):  # dense-tight before dense
                more = rest.removeprefix(codec)
                if not rest.startswith(codec):
                    continue
                delta, more = more.startswith(_DELTA), more.removeprefix(_DELTA)
                if not more or (more[1:] in POLICIES and more[0] == "-"):
                    return cls(name, codec, more[1:] or None, delta)
        raise ValueError(
            f"arm {name!r} is unknown: default, sglang-POLICY ({', '.join(SGLANG_POLICIES)}), or plt-CODEC"
            f"[{_DELTA}][-POLICY] ({', '.join((*CODECS, *PROFILED))}; {', '.join(POLICIES)})"
        )

    @property
    def has_cold_tier(self) -> bool:
        return self.codec is not None

    def flags(self) -> list[str]:
        """Flags that choose the cache, without sizes."""
        if self.codec is None:
            return ["--radix-eviction-policy", self.policy] if self.policy is not None else []
        flags = ["--radix-cache", "plt", "--plt-codec", self.codec]
        if self.policy is not None:
            flags += ["--plt-policy", self.policy]
        return [*flags, "--plt-delta", "on" if self.delta else "off"]


@dataclasses.dataclass(frozen=True)
class Budget:
    """Memory of one server.

    Attributes:
        pool_tokens: slots of the KV pool (``--max-total-tokens``).
        cold_bytes: of the cold tier (``--plt-cold-bytes``).
        row_bytes: of a token in the pool.
    """

    pool_tokens: int
    cold_bytes: int
    row_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of KV, in the pool and encoded."""
        return self.pool_tokens * self.row_bytes + self.cold_bytes

    def slots(self, arm: Arm, *, equal_bytes: bool) -> int:
        """Slots of the arm's pool.

        With ``equal_bytes`` an arm without a cold tier has slots for the bytes of the cold tier as well, so that all
        arms hold ``total_bytes``; else all arms have the same slots, and the cold tier comes on top.
        """
        extra = self.cold_bytes // self.row_bytes if equal_bytes and not arm.has_cold_tier else 0
        return self.pool_tokens + extra


def values_a_token(model_path: Path) -> int:
    """Numbers that the KV cache holds a token: keys and values of all layers and heads.

    Raises:
        OSError: the model has no ``config.json``.
        ValueError: it does not keep plain keys and values (MHA, GQA, MQA).
    """
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    if config.get("kv_lora_rank"):
        raise ValueError(f"{model_path} keeps latent rows (MLA); only models with plain keys and values are measured")
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim
    except KeyError as error:
        raise ValueError(f"{model_path}/config.json has no {error}") from None


def pool_dtype(on_gpu: bool) -> tuple[str, int]:
    """Dtype that a server runs in here and its bytes: bfloat16, on a CPU float32."""
    return ("bfloat16", 2) if on_gpu else ("float32", 4)


def server_args(
    arm: Arm, model_path: Path, budget: Budget, *, on_gpu: bool, equal_bytes: bool, more: tuple[str, ...] = ()
) -> list[str]:
    """Arguments of ``sglang.launch_server``; ``more`` is for arms with a cold tier."""
    args = ["--model-path", str(model_path), "--dtype", pool_dtype(on_gpu)[0], "--random-seed", "0"]
    args += [] if on_gpu else ["--device", "cpu", "--disable-cuda-graph", "--max-running-requests", "4"]
    args += ["--enable-metrics", "--enable-cache-report"]
    args += ["--max-total-tokens", str(budget.slots(arm, equal_bytes=equal_bytes)), *arm.flags()]
    if arm.has_cold_tier:
        args += ["--plt-cold-bytes", str(budget.cold_bytes), *more]
    return args


def make_server(args: list[str], *, on_gpu: bool, timeout_s: float = 400.0) -> ServerProcess:
    """A server that is not started yet; one at a time, since all want the whole machine."""
    return ServerProcess(args, env={} if on_gpu else CALM_THREADS, timeout_s=timeout_s)


def quarter_budget(longest: int, total: int, row_bytes: int) -> Budget:
    """A pool and a cold tier of the same bytes, which together hold about a quarter of the working set as plain rows.

    Args:
        longest: tokens of the longest session; the pool holds it with some room.
        total: tokens of all sessions.
    """
    pool = max(math.ceil(total / 8), longest + longest // 8 + 64)
    return Budget(pool, pool * row_bytes, row_bytes)
