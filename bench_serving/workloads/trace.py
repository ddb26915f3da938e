"""Request traces in Mooncake's format, with token ids made from the hash ids.

One JSON object a line (FAST'25, kvcache-ai/Mooncake, ``FAST25-release/traces``): ``timestamp`` in ms, ``input_length``
and ``output_length`` in tokens, ``hash_ids`` with one id per started block of 512 prompt tokens; equal ids are equal
prefixes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench_serving.workloads.base import Session, Tokenizer, Turn, check_at_least

BLOCK_TOKENS = 512
_FIRST_ID = 256
"""Lower ids are special tokens and bytes in most tokenizers."""


@dataclass(frozen=True)
class Trace:
    """One session of one request a line.

    Attributes:
        path: file of the trace.
        time_scale: multiplies the time between requests; 0.5 is twice the rate.
        limit: most requests; None takes all.
        seed: another seed gives other tokens for the same ids.
    """

    path: Path
    time_scale: float = 1.0
    limit: int | None = None
    seed: int = 0
    name: str = "trace"

    def __post_init__(self) -> None:
        check_at_least(self, 0, "time_scale")
        if self.limit is not None:
            check_at_least(self, 1, "limit")

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """In the order of the file; ``start_s`` counts from its first timestamp. An output of 0 tokens becomes 1.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is no request, time goes backwards, or there is none; begins with file and line number.
        """
        found: list[Session] = []
        first = last = 0.0
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(found) == self.limit:
                    break
                try:
                    time, tokens, output = self._request(json.loads(line), tokenizer.vocab_size)
                    if found and time < last:
                        raise ValueError(f"timestamp={time} is before {last} of the line above; sort by time")
                except (ValueError, KeyError, TypeError) as error:
                    said = f"{error} is missing" if isinstance(error, KeyError) else error
                    raise ValueError(f"{self.path}:{number}: {said}") from None
                last = time
                first = first if found else time
                start = (time - first) / 1000 * self.time_scale
                found.append(Session(f"request-{number}", (Turn(tokens, max(1, output)),), start_s=start))
        if not found:
            raise ValueError(f"{self.path}:1: the file holds no request")
        return found

    def _request(self, record: dict[str, Any], vocab_size: int) -> tuple[float, tuple[int, ...], int]:
        length, output, ids = record["input_length"], record["output_length"], record["hash_ids"]
        for name, value, minimum in (("input_length", length, 1), ("output_length", output, 0)):
            if not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {minimum}")
        expected = -(-length // BLOCK_TOKENS)
        if not isinstance(ids, list) or len(ids) != expected:
            count = len(ids) if isinstance(ids, list) else 0
            raise ValueError(f"input_length={length} makes {expected} blocks, hash_ids has {count}")
        tokens = [token for block in ids for token in self._block(block, vocab_size)]
        return float(record["timestamp"]), tuple(tokens[:length]), output

    def _block(self, hash_id: int, vocab_size: int) -> list[int]:
        if not isinstance(hash_id, int) or hash_id < 0:
            raise ValueError(f"hash_ids holds {hash_id!r}; an id is a whole number, at least 0")
        generator = np.random.default_rng([self.seed, hash_id])
        return generator.integers(min(_FIRST_ID, vocab_size - 1), vocab_size, BLOCK_TOKENS).tolist()
