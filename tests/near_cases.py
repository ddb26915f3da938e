"""Prompts that differ near their top from one seen before: what near-miss reuse must answer as if it had computed them.

``refused`` cases move content: there reuse must not happen at all.
"""

from __future__ import annotations

from dataclasses import dataclass

_TEXT = (
    "Every visitor signs the book at the door, and the book is kept in a green binder on the third shelf. Lunch is at "
    "noon, the meeting room on the second floor is free after four, and the printer wants paper twice a week. Nobody "
    "may take the binder home; whoever moves it writes down where it went and when it will be back. The garden is "
    "watered before nine, except when it rained at night, and the gate is locked by the last who leaves. Parcels wait "
    "in the hall until Friday and are sent back on Saturday morning. The boiler is looked at in spring, the roof in "
    "autumn, and the lift whenever it makes a noise that the one before it did not make. Letters go out at three. "
    "Keys hang on the board behind the desk, each on its own hook, and a hook without a key must have a note. The "
    "kitchen is cleaned by whoever used it last, the windows by nobody in particular, and the stairs by a firm that "
    "comes on Tuesdays. When the alarm rings, everybody meets under the big tree, where somebody counts. Bicycles "
    "stand behind the shed and never in the yard, since the van needs the yard to turn. Chairs that are broken go to "
    "the cellar, where a man from the village mends them when there are five. The piano may be played between two and "
    "four, softly, and by one person at a time. In winter the small door stays shut, and the heating is turned down "
    "at ten by whoever is still there. The cat belongs to nobody and is fed by all. Ladders are lent for a day, saws "
    "for an afternoon, and the big drill only to those who have shown that they can use it. Whoever finds a glove lays "
    "it on the bench by the stove. "
)
_BETWEEN = (
    "What follows was copied by hand from a list that hung in the hall for many years, and nobody knows who wrote it. "
)


@dataclass(frozen=True)
class NearCase:
    """``target`` is ``reference`` but for what decides the answer to ``question``."""

    name: str
    reference: str
    target: str
    question: str
    refused: bool = False


def _near(kind: str, pattern: str, one: str, other: str, question: str) -> NearCase:
    head = "Read the following notes with care.\n"
    return NearCase(kind, *(f"{head}{pattern.format(x)}\n{_TEXT}\n" for x in (one, other)), question)


def _moved(kind: str, first: str, second: str, question: str) -> NearCase:
    texts = (f"Read the following notes with care.\n{a}\n{_BETWEEN}{b}\n{_TEXT}\n" for a, b in
             ((first, second), (second, first)))  # fmt: skip
    return NearCase(kind, *texts, question, refused=True)


CASES = (
    _near("number", "The warehouse holds {} crates.", "318", "752", "How many crates? The warehouse holds"),
    _near("negation", "Guests are {} allowed to bring dogs.", "always", "not", "May guests bring dogs? Guests are"),
    _near("unit", "The tank is filled with 40 {} of water.", "litres", "gallons", "The tank is filled with 40"),
    _near("date", "The review is on {}.", "3 May 2021", "3 July 2021", "When is the review? The review is on"),
    _near("name", "The key belongs to {}.", "Anna Berg", "Boris Klein", "Whose key is it? The key belongs to"),
    _near("code-constant", "LIMIT = {}\ndef limit():\n    return LIMIT\n", "25", "90", "What is LIMIT? LIMIT ="),
    _near("code-operator", "def check(a, b):\n    return a {} b\n", "<", ">", "def check(a, b):\n    return a"),
    _near("code-default", "def wait(seconds={}):\n    sleep(seconds)\n", "10", "60", "def wait(seconds="),
    _near("code-name", "def {}(order):\n    return order.id\n", "read_id", "take_id", "The function is called"),
    _near("code-boolean", "DEBUG = {}\nprint(DEBUG)\n", "True", "False", "The program prints"),
    _near("code-import", "from shop import {}\n", "orders", "prices", "The program needs: from shop import"),
    _near("json-value", '{{"id": {}, "state": "open"}}', "4117", "8203", 'The id of the record: {"id":'),
    _near("json-key", '{{"{}": 12, "state": "open"}}', "height", "weight", 'The first key of the record is "'),
    _near("json-boolean", '{{"active": {}, "level": 3}}', "true", "false", 'The record begins with {"active":'),
    _near("json-string", '{{"city": "{}", "zip": 100}}', "Oslo", "Lima", 'The city of the record: {"city": "'),
    _near("json-null", '{{"owner": {}, "zip": 100}}', '"Ada"', "null", 'The owner of the record: {"owner":'),
    _near("table-cell", "| item | price |\n| pen | {} |\n| cup | 7 |", "3", "9", "| item | price |\n| pen |"),
    _near("table-unit", "| item | weight in {} |\n| pen | 3 |", "grams", "ounces", "Weights are given in"),
    _near("table-head", "| {} | price |\n| pen | 3 |", "item", "tool", "The first column is called"),
    _near("dialogue-name", "{}: I will bring the cake.\nTom: Fine.", "Mia", "Eva", "Who brings the cake? It is"),
    _near("dialogue-time", "Mia: We meet at {}.\nTom: Fine.", "seven", "four", "When do they meet? They meet at"),
    _near("dialogue-answer", "Mia: Are you coming?\nTom: {}.", "Yes", "No", "Is Tom coming? Tom said"),
    _near("dialogue-place", "Mia: I wait at the {}.\nTom: Fine.", "station", "harbour", "Mia waits at the"),
    _near("inserted", "The door is blue.{}", "", " The window is red.", "The colours are blue and"),
    _near("deleted", "The door is blue.{}", " The window is red.", "", "The colours are"),
    _moved("values-swapped", "The code of Anna is 4831.", "The code of Anna is 2076.", "The code of Anna is"),
    _moved("blocks-swapped", "Library: it opens at nine.", "Workshop: it closes at ten.", "First comes the"),
    _moved("json-swapped", '{"id": 5127, "n": 1}', '{"id": 8841, "n": 2}', 'The first record: {"id":'),
    _moved("rows-swapped", "| pen | three |", "| cup | seven |", "The first row is about a"),
    _moved("turns-swapped", "Mia: I like the plan.", "Tom: I hate the plan.", "The first to speak is"),
    _moved("functions-swapped", "def first(): return 'left'", "def second(): return 'right'", "The first returns"),
)
