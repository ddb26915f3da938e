"""Pairs of prompts whose right answers differ though their tokens hardly do."""

from __future__ import annotations

from dataclasses import dataclass

_FILLER = (
    "The office keeps its records in a green binder on the third shelf, and every visitor signs the book at the door. "
    "Lunch is served at noon, the meeting room on the second floor is free after four, and the printer needs paper. "
    "Nobody may take the binder home, and whoever moves it must write down where it went and when it will come back. "
)


@dataclass(frozen=True)
class Case:
    """``reference`` is seen first; ``target`` is the same but for what decides the answer to ``question``."""

    name: str
    reference: str
    target: str
    question: str


def _records(first: tuple[str, str], second: tuple[str, str]) -> str:
    lines = "".join(f"The door code of {name} is {code}. " for name, code in (first, second))
    return f"Notes of the front desk.\n{lines}\n{_FILLER * 2}"


def _sections(order: tuple[int, int]) -> str:
    texts = (
        "The library opens at nine and closes at seven. It lends maps, records and telescopes. ",
        "The workshop opens at noon and closes at ten. It lends saws, drills and ladders. ",
    )
    return "Guide to the house.\n" + "\n".join(texts[index] + _FILLER for index in order)


def _headings(first: str, second: str) -> str:
    return (
        f"Two plans are on the table.\n{first}: we rent a boat, sail along the coast and sleep in harbours. {_FILLER}"
        f"\n{second}: we take the night train, walk in the hills and sleep in a hut. {_FILLER}\n"
    )


CASES = (
    Case(
        "values-swapped",
        _records(("Anna", "4831"), ("Boris", "2076")),
        _records(("Anna", "2076"), ("Boris", "4831")),
        "Question: What is the door code of Anna?\nAnswer: The door code of Anna is",
    ),
    Case(
        "blocks-swapped",
        _sections((0, 1)),
        _sections((1, 0)),
        "Question: What is described first, the library or the workshop?\nAnswer: What is described first is the",
    ),
    Case(
        "headings-swapped",
        _headings("Plan A", "Plan B"),
        _headings("Plan B", "Plan A"),
        "Question: What do we do in Plan A?\nAnswer: In Plan A we",
    ),
    Case(
        "number-changed",
        f"The warehouse holds 318 crates of oranges.\n{_FILLER * 2}",
        f"The warehouse holds 752 crates of oranges.\n{_FILLER * 2}",
        "Question: How many crates of oranges does the warehouse hold?\nAnswer: The warehouse holds",
    ),
    Case(
        "negation",
        f"Guests are allowed to bring dogs into the garden.\n{_FILLER * 2}",
        f"Guests are not allowed to bring dogs into the garden.\n{_FILLER * 2}",
        "Question: May guests bring dogs into the garden?\nAnswer: Guests are",
    ),
    Case(
        "unit-changed",
        f"The tank must be filled with 40 litres of water every morning.\n{_FILLER * 2}",
        f"The tank must be filled with 40 gallons of water every morning.\n{_FILLER * 2}",
        "Question: With how much water must the tank be filled?\nAnswer: The tank must be filled with 40",
    ),
)
