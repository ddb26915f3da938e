"""Prose, Python code, tool descriptions and their JSON output that look real, made from a seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

_FIRST = (
    *("Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hanna", "Ivan", "Jonas", "Karin", "Leila"),
    *("Mateo", "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Samir", "Tomasz", "Ursula", "Victor", "Wanda", "Yusuf"),
)
_LAST = (
    *("Lindqvist", "Moreau", "Okafor", "Petersen", "Quist", "Romero", "Sato", "Tanaka", "Urbina", "Vogel", "Weber"),
    *("Yilmaz", "Zhang", "Abbott", "Brandt", "Castro", "Dvorak", "Eriksen", "Fischer", "Garcia", "Haddad", "Ito"),
)
_COMPANIES = ("Northwind Logistics", "Halden Retail", "Meridian Freight", "Blue Heron Outfitters", "Corvus Systems")
_CITIES = ("Rotterdam", "Leipzig", "Gdansk", "Porto", "Turin", "Malmo", "Lyon", "Antwerp", "Bilbao", "Graz", "Cork")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_GOODS = (
    *("folding chair", "steel shelf", "desk lamp", "water filter", "bicycle pump", "camping stove", "label printer"),
    *("garden hose", "safety helmet", "battery pack", "paper shredder", "tool cabinet", "floor mat", "wall clock"),
)
_STATES = ("pending", "packed", "in transit", "delivered", "returned", "on hold", "cancelled")
_THINGS = (
    *("shipment", "invoice", "customer record", "warehouse report", "delivery note", "refund", "purchase order"),
    *("service contract", "stock count", "customs form", "route plan", "price list", "complaint", "audit trail"),
)
_ACTIONS = (
    *("confirm", "update", "forward", "archive", "review", "reject", "escalate", "reopen", "summarise", "verify"),
    *("compare", "cancel", "reassign", "annotate"),
)
_WHY = (
    "because the customer was promised an answer within the day",
    "since the carrier does not accept changes after the label was printed",
    "so that the finance team can close the month without asking again",
    "unless a supervisor has already signed it off in writing",
    "even if the amount is small and the case looks familiar",
    "which is what went wrong in most of the cases of last quarter",
    "as the warehouse counts its stock only twice a week",
    "and note the reason in one sentence that a stranger would understand",
)
_WHEN = (
    "Before you {a} a {t}, check that the {u} belongs to the same account, {w}.",
    "When a {t} and a {u} disagree, {a} the newer one and tell {p}, {w}.",
    "Never {a} a {t} twice: look for a {u} of the same day first, {w}.",
    "If {p} from {c} asks about a {t}, {a} the {u} before anything else, {w}.",
    "The team in {c} can {a} any {t} below {n} euros without a {u}, {w}.",
    "A {t} older than {n} days needs a fresh {u}; ask {p} to {a} it, {w}.",
)
_STORY = (
    "{p} came to {c} on a {d} to {a} the {t} that had been lying there for {n} days.",
    "By the evening nobody in {c} remembered who had asked to {a} the {t}, and {p} went home.",
    "It rained for {n} hours; the road to {c} was closed, and the {t} had to wait until {d}.",
    "The letter said that the {u} was lost, {w}, but {p} had seen it on {d}.",
    "There were {n} crates in the yard, each with a {g}, and not one of them was meant for {c}.",
    "{p} counted the money again, put the {u} into the drawer, and said nothing about the {g}.",
)
_ASK = (
    "Where is order {o}? {p} in {c} has been waiting for the {g} since {d}.",
    "Please {a} the {t} of {p}, and tell me what is missing from the {u}.",
    "I was charged {n} euros twice for one {g}. Can you {a} the {t} and explain what happened?",
    "Can you compare the {t} of {c} with the {u} from {d}, and list what differs?",
    "We need {n} more of the {g} in {c} by {d}. Which warehouse can send them, and what does it cost?",
)
_VERBS = ("search", "get", "list", "update", "create", "cancel", "export", "validate")
_NOUNS = ("orders", "invoices", "shipments", "customers", "tickets", "returns", "stock_levels", "carriers", "routes")
_FIELDS = {
    "order_id": "Identifier of the order, for example ORD-48213.",
    "customer_id": "Identifier of the customer account.",
    "status": "Only entries in this state.",
    "since": "Earliest date, as YYYY-MM-DD.",
    "until": "Latest date, as YYYY-MM-DD; today when left out.",
    "limit": "Most entries to return, at most 200.",
    "warehouse": "City of the warehouse.",
    "reason": "One sentence that is stored with the change.",
    "notify": "Whether the customer is told by e-mail.",
}
_TYPES = {"limit": "integer", "notify": "boolean"}


class Texts:
    """A stream of texts; every call gives another one.

    Args:
        seed: the same seed and calls give the same texts.
    """

    def __init__(self, seed: int | str):
        self.rng = random.Random(seed)

    def _pick(self, options: Sequence[str]) -> str:
        return self.rng.choice(options)

    # -- small parts ----------------------------------------------------------------------------------------------

    def person(self) -> str:
        return f"{self._pick(_FIRST)} {self._pick(_LAST)}"

    def company(self) -> str:
        return self._pick(_COMPANIES)

    def date(self) -> str:
        """For example ``Tuesday, 14 October 2025``."""
        return (
            f"{self._pick(_DAYS)}, {self.rng.randrange(1, 29)} {self._pick(_MONTHS)} {self.rng.randrange(2023, 2027)}"
        )

    def iso_date(self) -> str:
        return f"{self.rng.randrange(2023, 2027)}-{self.rng.randrange(1, 13):02}-{self.rng.randrange(1, 29):02}"

    def ident(self) -> str:
        """Eight hexadecimal digits in two groups."""
        return f"{self.rng.randrange(1 << 16):04x}-{self.rng.randrange(1 << 16):04x}"

    def _fill(self, patterns: Sequence[str]) -> str:
        thing, other = self.rng.sample(_THINGS, 2)
        text = self._pick(patterns).format(
            **{"t": thing, "u": other, "a": self._pick(_ACTIONS), "p": self.person(), "c": self._pick(_CITIES)},
            **{"d": self._pick(_DAYS), "n": self.rng.randrange(2, 400), "g": self._pick(_GOODS), "w": self._pick(_WHY)},
            o=f"ORD-{self.rng.randrange(10_000, 99_999)}",
        )
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    # -- prose ----------------------------------------------------------------------------------------------------

    def rule(self) -> str:
        """A sentence of a work instruction."""
        return self._fill(_WHEN)

    def question(self) -> str:
        """What a customer or an employee asks."""
        return self._fill(_ASK)

    def questions(self) -> str:
        """A question and a space, to be followed by the next."""
        return self.question() + " "

    def paragraph(self) -> str:
        """Three to six sentences, some of a story and some of an instruction, and a blank line."""
        count = self.rng.randrange(3, 7)
        return " ".join(self._fill(_STORY if self.rng.random() < 0.7 else _WHEN) for _ in range(count)) + "\n\n"

    # -- tools ----------------------------------------------------------------------------------------------------

    def tools(self, count: int) -> list[dict[str, Any]]:
        """Descriptions with different names, in the form of JSON schemas.

        Raises:
            ValueError: there are not that many names.
        """
        names = [(verb, noun) for verb in _VERBS for noun in _NOUNS]
        return [self._tool(verb, noun) for verb, noun in self.rng.sample(names, count)]

    def _tool(self, verb: str, noun: str) -> dict[str, Any]:
        fields = self.rng.sample(sorted(_FIELDS), self.rng.randrange(2, 5))
        properties = {field: {"type": _TYPES.get(field, "string"), "description": _FIELDS[field]} for field in fields}
        return {
            "name": f"{verb}_{noun}",
            "description": f"{verb.title()} {noun.replace('_', ' ')}. {self.rule()}",
            "parameters": {"type": "object", "properties": properties, "required": fields[:1]},
        }

    def tool_output(self, num_entries: int) -> str:
        """JSON of an answer with so many entries."""
        make = self.rng.choice((self._order, self._log_entry, self._hit))
        entries = [make() for _ in range(num_entries)]
        answer = {"status": "ok", "count": num_entries, "took_ms": self.rng.randrange(3, 900), "results": entries}
        return json.dumps(answer, indent=self.rng.choice((None, 1, 2)))

    def _order(self) -> dict[str, Any]:
        lines = [
            {
                "sku": f"{self._pick(_GOODS).replace(' ', '-')}-{self.rng.randrange(100, 999)}",
                "quantity": self.rng.randrange(1, 40),
                "unit_price": round(self.rng.uniform(3, 400), 2),
            }
            for _ in range(self.rng.randrange(1, 4))
        ]
        return {
            "order_id": f"ORD-{self.rng.randrange(10_000, 99_999)}",
            "customer": {"name": self.person(), "city": self._pick(_CITIES), "id": self.ident()},
            "status": self._pick(_STATES),
            "created": self.iso_date(),
            "express": self.rng.random() < 0.3,
            "tracking": None if self.rng.random() < 0.3 else f"{self.rng.randrange(1 << 40):012x}",
            "lines": lines,
        }

    def _log_entry(self) -> dict[str, Any]:
        clock = f"{self.rng.randrange(24):02}:{self.rng.randrange(60):02}:{self.rng.randrange(60):02}"
        return {
            "time": f"{self.iso_date()}T{clock}Z",
            "level": self._pick(("INFO", "INFO", "WARNING", "ERROR")),
            "service": f"{self._pick(_NOUNS)}-{self._pick(('api', 'worker', 'sync'))}",
            "message": f"could not {self._pick(_ACTIONS)} {self._pick(_THINGS)} {self.ident()}: {self._pick(_STATES)}",
            "retries": self.rng.randrange(6),
        }

    def _hit(self) -> dict[str, Any]:
        return {
            "path": f"docs/{self._pick(_NOUNS)}/{self._pick(_VERBS)}.md",
            "score": round(self.rng.random(), 4),
            "snippet": self.rule(),
        }

    # -- code -----------------------------------------------------------------------------------------------------

    def code(self) -> str:
        """A Python function with docstring, checks and a loop."""
        verb, noun, action = self._pick(_VERBS), self._pick(_NOUNS), self._pick(_ACTIONS)
        field, limit = self._pick(sorted(_FIELDS)), self.rng.randrange(2, 400)
        one, state = f"one_{noun}".removesuffix("s"), self._pick(_STATES)
        return (
            f"def {action}_{noun}({noun}: list[dict], {field}: str, limit: int = {limit}) -> list[dict]:\n"
            f'    """{action.title()} the {noun.replace("_", " ")} of one {field}.\n\n    {self.rule()}\n    """\n'
            f"    if limit < {self.rng.randrange(1, 3)}:\n"
            f'        raise ValueError(f"limit={{limit}} is too small to {verb} {noun}")\n'
            f"    found = []\n"
            f"    for {one} in {noun}:\n"
            f'        if {one}["{field}"] != {field} or {one}.get("status") == "{state}":\n'
            f"            continue\n"
            f'        found.append({{**{one}, "{action}_by": "{self._pick(_FIRST).lower()}", "round": len(found)}})\n'
            f"        if len(found) == limit:\n"
            f"            break\n"
            f'    return sorted(found, key=lambda {one}: {one}["{field}"])\n\n\n'
        )
