"""Seeded workloads: sessions of turns whose texts look real and whose lengths are exact."""

from bench_serving.workloads.agents import Agents
from bench_serving.workloads.base import ModelTokenizer, Session, Tokenizer, Turn, Workload
from bench_serving.workloads.fleet import Fleet
from bench_serving.workloads.multi_turn import MultiTurn
from bench_serving.workloads.near_duplicates import NearDuplicates
from bench_serving.workloads.shared_prefix import SharedPrefix
from bench_serving.workloads.trace import Trace

__all__ = [
    "WORKLOADS",
    "Agents",
    "Fleet",
    "ModelTokenizer",
    "MultiTurn",
    "NearDuplicates",
    "Session",
    "SharedPrefix",
    "Tokenizer",
    "Trace",
    "Turn",
    "Workload",
]

WORKLOADS: dict[str, type[Workload]] = {
    "fleet": Fleet,
    "multi_turn": MultiTurn,
    "agents": Agents,
    "shared_prefix": SharedPrefix,
    "near_duplicates": NearDuplicates,
    "trace": Trace,
}
"""By the name that each of them bears."""
