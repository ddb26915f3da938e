"""Workloads: the same from the same seed, as long as promised, different where they say and nowhere else."""

import ast
import dataclasses
import json
import re
from itertools import pairwise

import pytest

from bench_serving.workloads import (
    WORKLOADS,
    Agents,
    Fleet,
    ModelTokenizer,
    MultiTurn,
    NearDuplicates,
    Session,
    SharedPrefix,
    Trace,
    Turn,
)
from bench_serving.workloads.base import fit
from bench_serving.workloads.texts import Texts

NEAR_TOP = 60


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir):
    return ModelTokenizer(demo_model_dir)


SMALL = {
    "fleet": Fleet(4, 2, system_tokens=1500),
    "multi_turn": MultiTurn(3, 2, system_tokens=1500, think_s=2.0),
    "agents": Agents(2, 3, preamble_tokens=1500, tool_tokens=120),
    "shared_prefix": SharedPrefix(3, 2, system_len=200, question_len=50),
    "near_duplicates": NearDuplicates((300, 600), 4),
}


def common(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def common_end(first, second):
    return common(first[::-1], second[::-1])


def test_every_workload_is_here():
    assert set(WORKLOADS) == {*SMALL, "trace"}
    assert all(SMALL[name].name == name and type(SMALL[name]) is WORKLOADS[name] for name in SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_decides(name, tokenizer):
    workload = SMALL[name]
    sessions = workload.sessions(tokenizer)
    assert sessions == workload.sessions(tokenizer)
    assert sessions != dataclasses.replace(workload, seed=1).sessions(tokenizer)
    names = [session.name for session in sessions]
    assert len(set(names)) == len(names)
    for index, session in enumerate(sessions):
        assert session.parent is None or session.parent in names[:index]
        assert session.turns


@pytest.mark.parametrize("length", [1500, 2000])
def test_a_fleet_differs_near_the_top(tokenizer, length):
    fleet = Fleet(8, 2, system_tokens=length, turn_tokens=70, output_tokens=3)
    sessions = fleet.sessions(tokenizer)
    assert len(sessions) == 8
    for session in sessions:
        assert len(session.preamble) == length
        assert [len(turn.append) for turn in session.turns] == [70, 70]
        assert [turn.max_new_tokens for turn in session.turns] == [3, 3]
        assert session.own_tokens == length + 2 * 73
    plain = [session.preamble for index, session in enumerate(sessions) if index % 4 != 3]
    for first, second in pairwise(plain):
        texts = [tokenizer.decode(ids) for ids in (first, second)]
        tops, bodies = zip(*(text.split("You help", 1) for text in texts), strict=True)
        assert tops[0] != tops[1]
        assert all(len(tokenizer.encode(top)) <= NEAR_TOP for top in tops)
        assert common(*bodies) >= min(map(len, bodies)) - 40  # cut to length, so the ends differ by what the tops do
    tops = {tokenizer.decode(session.preamble[:NEAR_TOP]).split("You help")[0] for session in sessions}
    assert len(tops) == 8


def test_a_quarter_of_a_fleet_has_an_order_of_its_own(tokenizer):
    orders = []
    for session in Fleet(8, 1).sessions(tokenizer):
        orders.append(re.findall(r'{"name": "(\w+)", "description"', tokenizer.decode(session.preamble)))
    assert all(len(order) == 8 for order in orders)
    usual = [order for index, order in enumerate(orders) if index % 4 != 3]
    own = [orders[3], orders[7]]
    assert all(order == orders[0] for order in usual)
    assert all(order != orders[0] and sorted(order) == sorted(orders[0]) for order in own)


def test_chats(tokenizer):
    workload = SMALL["multi_turn"]
    shared = workload.sessions(tokenizer)
    assert {session.preamble for session in shared} == {shared[0].preamble}
    assert len(shared[0].preamble) == 1500
    assert all(len(turn.append) == 60 and turn.max_new_tokens == 32 for s in shared for turn in s.turns)
    assert all(s.turns[0].think_s == 0 and s.turns[1].think_s > 0 for s in shared)
    own = dataclasses.replace(workload, templated=True, think_s=0).sessions(tokenizer)
    assert len({session.preamble for session in own}) == 3
    assert all(common(own[0].preamble, session.preamble) < NEAR_TOP for session in own[1:])
    assert not any(turn.think_s for session in own for turn in session.turns)


def test_a_chat_about_a_document(tokenizer):
    workload = MultiTurn(2, 2, system_tokens=96, num_tools=0, document_tokens=300, question_tokens=40)
    first, second = workload.sessions(tokenizer)
    assert [len(turn.append) for turn in first.turns] == [340, 40]
    assert first.turns[0].append != second.turns[0].append
    text = tokenizer.decode(first.turns[0].append)
    assert text.startswith("\n\nDocument:")
    assert "\n\nUser: " in text
    assert '"parameters"' not in tokenizer.decode(first.preamble)
    one_tool = dataclasses.replace(workload, system_tokens=400, num_tools=1).sessions(tokenizer)
    assert tokenizer.decode(one_tool[0].preamble).count('"parameters"') == 1


def test_agents_branch_and_their_tools_answer_in_json_and_python(tokenizer):
    workload = Agents(6, 4, preamble_tokens=1500, tool_tokens=150, num_forks=1, num_sub_agents=2)
    sessions = workload.sessions(tokenizer)
    roots = [session for session in sessions if session.parent is None]
    assert len(sessions) == 6 * 4
    assert {session.preamble for session in roots} == {roots[0].preamble}
    assert len(roots[0].preamble) == 1500
    for session in sessions:
        if session.parent is not None:
            assert 1 <= session.parent_turns < 4
            assert not session.preamble
            assert len(session.turns) == 2
    kinds = set()
    for turn in (turn for session in sessions for turn in session.turns):
        text = tokenizer.decode(turn.append).removesuffix("\n\nAssistant:")
        if "Tool result:\n" not in text:
            assert len(turn.append) == 80
            continue
        assert 150 <= len(turn.append) <= 320
        output = text.split("Tool result:\n")[1]
        if output.startswith("```python\n"):
            kinds.add("code")
            assert ast.parse(output.removeprefix("```python\n").removesuffix("```")).body
        else:
            kinds.add("json")
            answer = json.loads(output)
            assert answer["count"] == len(answer["results"]) > 0
    assert kinds == {"code", "json"}


def test_shared_prefixes(tokenizer):
    sessions = SMALL["shared_prefix"].sessions(tokenizer)
    assert len(sessions) == 6
    assert len({session.preamble for session in sessions}) == 3
    assert all(len(session.preamble) == 200 and len(session.turns[0].append) == 50 for session in sessions)
    assert len({session.turns for session in sessions}) == 6
    assert [session.name for session in sessions] != sorted(session.name for session in sessions)


def test_near_duplicates_change_one_thing_near_the_top(tokenizer):
    sessions = NearDuplicates().sessions(tokenizer)
    prompts = {session.name: session.turns[0].append for session in sessions}
    assert len(prompts) == 14
    for length in (2000, 6000):
        of_length = [ids for name, ids in prompts.items() if name.startswith(f"{length}/")]
        assert len(set(of_length)) == 7
        assert all(len(ids) == length for ids in of_length)
        original = tokenizer.decode(prompts[f"{length}/0-original"]).splitlines()
        for name, ids in prompts.items():
            if not name.startswith(f"{length}/") or name.endswith("original"):
                continue
            assert common(prompts[f"{length}/0-original"], ids) < 100
            changed = [now.split(":")[0] for was, now in zip(original[:3], tokenizer.decode(ids).splitlines(), strict=False) if was != now]  # fmt: skip # noqa: E501
            assert changed == [{"date": "Date", "name": "For", "question": "Question"}[name.split("-")[1]]]
            assert len(tokenizer.encode("\n".join(tokenizer.decode(ids).splitlines()[:3]))) < 100


def test_wrong_parameters_are_refused(tokenizer, tmp_path):
    for make in (
        lambda: Fleet(0), lambda: MultiTurn(think_s=-1), lambda: Agents(num_turns=1), lambda: SharedPrefix(0),
        lambda: NearDuplicates(()), lambda: NearDuplicates(num_variants=0), lambda: Trace(tmp_path, limit=0),
        lambda: Turn((1,), 0), lambda: Turn((1,), 1, -1.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must|empty"):
            make()
    with pytest.raises(ValueError, match="no room"):
        Fleet(system_tokens=50).sessions(tokenizer)
    with pytest.raises(FileNotFoundError, match="fast tokenizer"):
        ModelTokenizer(tmp_path)


def test_fit_is_exact(tokenizer):
    texts = Texts(3)
    for length in (10, 77, 500):
        ids = fit(tokenizer, texts.paragraph, length, begin="Title\n", end="\nEnd.")
        assert len(ids) == length
        text = tokenizer.decode(ids)
        assert text.startswith("Title\n")
        assert text.endswith("\nEnd.")


def test_code_and_tool_output_are_whole():
    texts = Texts(5)
    for count in range(1, 30):
        assert len(json.loads(texts.tool_output(count))["results"]) == count
        assert isinstance(ast.parse(texts.code()).body[0], ast.FunctionDef)
        assert "  " not in texts.question()
        assert not re.search(r"\b[Aa] [aeiou]", texts.rule())


def test_own_tokens_count_answers():
    assert Session("x", (Turn((1, 2), 3), Turn((4,), 5)), preamble=(6,) * 7).own_tokens == 7 + 5 + 6
