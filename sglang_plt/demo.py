"""Several users chat in turn with one server whose KV pool holds about a quarter of their conversations.

What happens to every prompt token is shown as it happens: reused from the device, restored from the cold tier, or
computed again.
"""

from __future__ import annotations

import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sglang_plt.results import Row
from sglang_plt.serving import RequestError, ServerProcess

MAX_NEW_TOKENS = 12
OVERFLOW = 3.5
"""How often the finished conversations fill the pool, by default."""
SYSTEM_TOKENS, TURN_TOKENS = 170, 50
"""What a conversation costs in the demo model's tokens; other tokenizers come close enough to size a pool."""

_SHOPS = (
    ("Lantern and Oak", "a furniture workshop", "Graz"),
    ("Blue Heron", "a shop for boats and sails", "Bergen"),
    ("The Quiet Bee", "a tea house", "Porto"),
    ("Copper Violin", "a maker of instruments", "Cremona"),
    ("North Meadow", "a garden centre", "Utrecht"),
    ("Red Falcon", "a bicycle shop", "Leeds"),
    ("Paper Moon", "a bookshop", "Lyon"),
    ("Salt and Stone", "a pottery", "Faro"),
)
_NAMES = ("Ada", "Bruno", "Carla", "David", "Elif", "Frida", "Goran", "Hanna", "Ivan", "Jonas", "Karin", "Lena")
_GOODS = (
    "lamp",
    "basket",
    "clock",
    "mirror",
    "kettle",
    "carpet",
    "candle",
    "blanket",
    "bottle",
    "ladder",
    "helmet",
    "bell",
)
_KINDS = ("green", "wooden", "small", "silver", "yellow", "heavy", "round", "white", "old", "plain")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_REASONS = (
    "I would like to visit the shop next week.",
    "Thank you, that helps. I have ordered a few things for my kitchen.",
    "Good to know. My neighbour told me about the shop yesterday.",
    "All right. I am also asking for a friend who lives nearby.",
)


class DemoError(RuntimeError):
    """The demo cannot run or go on; the message is one line that says what was found and what to do."""


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        max_total_tokens: size of the KV pool; None sizes it so that the conversations fill it :data:`OVERFLOW` times.
        cold_fraction: budget of the cold tier as a multiple of the pool's bytes.
    """

    model_path: Path
    codec: str = "int8"
    users: int = 6
    turns: int = 3
    max_total_tokens: int | None = None
    cold_fraction: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "turns"):
            if getattr(self, name) < 1:
                raise DemoError(f"--{name}={getattr(self, name)} must be at least 1")
        needed = conversation_tokens(self.turns)
        if self.max_total_tokens is not None and self.max_total_tokens < needed:
            raise DemoError(
                f"--max-total-tokens={self.max_total_tokens} does not hold one conversation of {self.turns} turns: "
                f"give at least {needed}, or fewer --turns"
            )

    @property
    def pool_tokens(self) -> int:
        one = conversation_tokens(self.turns)
        return self.max_total_tokens or max(one * 5 // 4, round(self.users * one / OVERFLOW))

    def server_args(self, on_gpu: bool) -> list[str]:
        """Arguments of ``sglang.launch_server``."""
        args = ["--model-path", str(self.model_path), "--max-total-tokens", str(self.pool_tokens)]
        args += ["--dtype", "bfloat16"] if on_gpu else ["--device", "cpu", "--dtype", "float32"]
        args += ["--disable-cuda-graph", "--max-running-requests", "4", "--random-seed", "0", "--enable-metrics"]
        args += ["--radix-cache", "plt", "--plt-codec", self.codec, "--plt-cold-fraction", str(self.cold_fraction)]
        return args


def conversation_tokens(turns: int) -> int:
    """About how many tokens a conversation ends with."""
    return SYSTEM_TOKENS + turns * TURN_TOKENS


@dataclass
class Chat:
    """One user: the history so far, append-only so that every prompt begins with the one before, and what to ask."""

    name: str
    messages: list[dict[str, str]]
    questions: list[str]

    @classmethod
    def make(cls, index: int, turns: int, seed: int) -> Chat:
        """User ``index`` of a seed; the same arguments give the same chat."""
        rng = random.Random(f"{seed}/{index}")
        shop, trade, town = _SHOPS[index % len(_SHOPS)]
        names = random.Random(seed).sample(_NAMES, len(_NAMES))
        name, owner = names[index % len(names)], names[(index + 1) % len(names)]
        goods = {f"{rng.choice(_KINDS)} {thing}": rng.randrange(10, 99) for thing in rng.sample(_GOODS, 9)}
        free, days = rng.choice(_DAYS), rng.randrange(2, 9)
        system = (
            f"You answer customers of {shop}, {trade} in {town}. The owner is {owner}. "
            f"The shop opens at {rng.randrange(7, 11)} in the morning, closes at {rng.randrange(17, 20)} and stays "
            f"closed on {free}. Delivery takes {days} days and costs {rng.randrange(3, 10)} euros. "
            "These are the prices in euros: "
            + ", ".join(f"the {thing} costs {price}" for thing, price in goods.items())
            + ". Customers may return what they bought within two weeks. Nothing else is for sale. "
            "Be friendly and answer in one short sentence."
        )
        asks = [
            "In which town is it, please?",
            "How many days does a delivery take?",
            "Who is the owner of the shop?",
            "On which day is the shop closed?",
            f"How much is the {rng.choice(list(goods))}?",
        ]
        questions = [f"{_REASONS[turn % len(_REASONS)]} {asks[turn % len(asks)]}" for turn in range(turns)]
        questions[0] = f"Good morning! {questions[0]}"
        return cls(name, [{"role": "system", "content": system}], questions)


@dataclass(frozen=True)
class Turn:
    """One request: where its prompt tokens came from, and how long it took.

    Attributes:
        device: prompt tokens whose KV was still in the pool.
        restored: prompt tokens whose KV came from the cold tier.
        first_token_s: until the first token arrived.
        total_s: until the last.
    """

    turn: int
    user: str
    prompt: int
    device: int
    restored: int
    first_token_s: float
    total_s: float
    reply: str

    @property
    def computed(self) -> int:
        return self.prompt - self.device - self.restored


@dataclass
class DemoResult:
    """Everything that the demo measured.

    Attributes:
        held_tokens: tokens of all conversations at their end.
        cold_token_bytes: bytes of an encoded token; None when nothing was restored.
        pool_token_bytes: bytes of the same token in the pool.
    """

    options: DemoOptions
    turns: list[Turn] = field(default_factory=list)
    chats: list[Chat] = field(default_factory=list)
    held_tokens: int = 0
    cold_token_bytes: float | None = None
    pool_token_bytes: float = 0.0

    def total(self, what: str) -> int:
        """Sum of a field of :class:`Turn`, or of ``computed``."""
        return sum(getattr(turn, what) for turn in self.turns)

    def share(self, what: str) -> float:
        return self.total(what) / self.total("prompt")

    def rows(self) -> list[Row]:
        """The numbers for :func:`sglang_plt.results.write_rows`."""
        arm, requests = f"plt-{self.options.codec}", len(self.turns)
        rows = [
            Row(f"{what}_share", arm, self.share(what), "1", n=requests) for what in ("device", "restored", "computed")
        ]
        rows.append(Row("prompt_tokens", arm, self.total("prompt"), "tokens", n=requests))
        rows.append(Row("pool_tokens", arm, self.options.pool_tokens, "tokens"))
        rows.append(Row("pool_bytes_per_token", arm, self.pool_token_bytes, "bytes"))
        if self.cold_token_bytes is not None:
            rows.append(Row("cold_bytes_per_token", arm, self.cold_token_bytes, "bytes", n=self.total("restored")))
        for name, turns in (("restored", self._turns(True)), ("computed", self._turns(False))):
            if turns:
                rows.append(Row(f"ttft_p50_{name}", arm, 1000 * _median_ttft(turns), "ms", n=len(turns)))
        return rows

    def _turns(self, restored: bool) -> list[Turn]:
        return [turn for turn in self.turns if bool(turn.restored) == restored]

    def summary(self) -> Iterator[str]:
        """The lines that a person reads at the end."""
        pool = self.options.pool_tokens
        times = self.held_tokens / pool
        yield f"conversations             {self.held_tokens:7d} tokens at the end, {times:.1f} times the pool of {pool}"
        yield f"prompt tokens             {self.total('prompt'):7d}"
        notes = {
            "device": "reused from the device   ",
            "restored": "restored from the cold tier",
            "computed": "computed                 ",
        }
        for what, name in notes.items():
            note = "   all that was still in the pool" if what == "device" else ""
            yield f"  {name:27s} {self.total(what):5d}  {self.share(what):6.1%}{note}"
        for restored, how in ((True, "where tokens were restored"), (False, "where they were computed")):
            if turns := self._turns(restored):
                yield (
                    f"first token after        {_median_ttft(turns):8.2f} s {how} (median of {len(turns)}, prompts of "
                    f"{statistics.mean(turn.prompt for turn in turns):.0f} tokens)"
                )
        if self.cold_token_bytes is None:
            yield "cold tier                 nothing was restored: lower --max-total-tokens or add --users"
        else:
            ratio = self.pool_token_bytes / self.cold_token_bytes
            yield (
                f"cold tier                 {self.cold_token_bytes:.0f} bytes a token as {self.options.codec}, "
                f"{self.pool_token_bytes:.0f} in the pool: {ratio:.1f} times smaller"
            )

    def sample(self) -> Iterator[str]:
        """The conversation of the first user."""
        for message in self.chats[0].messages:
            text = textwrap.fill(" ".join(message["content"].split()), 100, subsequent_indent=" " * 11)
            yield f"{message['role']:>9}: {text}"


def _median_ttft(turns: list[Turn]) -> float:
    return statistics.median(turn.first_token_s for turn in turns)


HEADER = "turn user    prompt device restored computed   first   total  reply"


def table_line(turn: Turn) -> str:
    """One line under :data:`HEADER`."""
    reply = " ".join(turn.reply.split())
    return (
        f"{turn.turn:>4} {turn.user:<7} {turn.prompt:>6} {turn.device:>6} {turn.restored:>8} {turn.computed:>8} "
        f"{turn.first_token_s:>5.2f} s {turn.total_s:>5.2f} s  {reply[:48] + '...' if len(reply) > 48 else reply}"
    )


def run_demo(options: DemoOptions, server: ServerProcess, on_turn: Callable[[Turn], None]) -> DemoResult:
    """Hold all conversations on a running server, one request at a time.

    Args:
        on_turn: called after every request.

    Raises:
        DemoError: the server refused a request or died.
    """
    chats = [Chat.make(index, options.turns, options.seed) for index in range(options.users)]
    result = DemoResult(options, chats=chats)
    last: dict[int, int] = {}
    try:
        for number in range(1, options.turns + 1):
            for index, chat in enumerate(chats):
                turn, new_tokens = _ask(server, chat, number)
                last[index] = turn.prompt + new_tokens
                result.turns.append(turn)
                on_turn(turn)
        metrics = server.metrics()
    except RequestError as error:
        raise DemoError(f"the server refused a request, see {server.log_path}: {error}") from error
    except OSError as error:
        state = "does not answer" if server.alive else "has died"
        raise DemoError(f"the server {state}, see {server.log_path}: {error}") from error
    result.held_tokens = sum(last.values())
    result.pool_token_bytes = metrics["cold_budget_bytes"] / options.cold_fraction / options.pool_tokens
    if metrics["restored_tokens_total"]:
        result.cold_token_bytes = metrics["decoded_bytes_total"] / metrics["restored_tokens_total"]
    return result


def _ask(server: ServerProcess, chat: Chat, number: int) -> tuple[Turn, int]:
    """Send the next question, keep the answer in the history; returns the turn and its output tokens."""
    chat.messages.append({"role": "user", "content": chat.questions[number - 1]})
    payload = {
        "model": "demo",
        "messages": chat.messages,
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_cached_tokens_details": True,
    }
    started = time.perf_counter()
    first: float | None = None
    reply = ""
    usage: dict[str, int] = {}
    details: dict[str, int] = {}
    for event in server.stream_json("/v1/chat/completions", payload):
        usage = event.get("usage") or usage
        details = (event.get("sglext") or {}).get("cached_tokens_details") or details
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                first = first or time.perf_counter() - started
                reply += text
    if not usage:
        raise ConnectionError("the answer ended before its last event")
    total = time.perf_counter() - started
    chat.messages.append({"role": "assistant", "content": reply})
    turn = Turn(
        turn=number,
        user=chat.name,
        prompt=usage["prompt_tokens"],
        device=details.get("device", 0),
        restored=details.get("host", 0),
        first_token_s=first or total,
        total_s=total,
        reply=reply,
    )
    return turn, usage["completion_tokens"]
