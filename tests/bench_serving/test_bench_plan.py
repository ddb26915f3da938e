"""What the side-by-side benchmark plays, with how much memory, and in which order."""

import pytest

from bench_serving.bench import _conditions
from bench_serving.bench_plan import (
    ALL_ARMS,
    ARMS,
    SIZED,
    BenchError,
    Plan,
    Sized,
    _extent,
    budget_of,
    factor_of,
    schedule,
)
from bench_serving.bench_runs import rotated
from bench_serving.servers import Arm
from bench_serving.workloads import ModelTokenizer, Session, Turn


def turn(*tokens, new=2):
    return Turn(tokens, new)


def test_what_sessions_share_counts_once():
    root = Session("a", (turn(3, 4), turn(5)), preamble=(1, 2))
    assert _extent([root]) == (2 + 2 + 2 + 1 + 2, 9)
    same_top = Session("b", (turn(3, 9),), preamble=(1, 2))
    assert _extent([root, same_top]) == (9 + 1 + 2, 9)
    # the branch begins as the parent goes on
    branch = Session("a/fork", (turn(5), turn(7)), parent="a", parent_turns=1)
    assert _extent([root, branch]) == (9 + 2 + 1 + 2, 12)


def sized(name, working_set, longest):
    return Sized(name, (), working_set, longest)


def test_all_arms_have_the_same_bytes():
    workloads = [sized("a", 8000, 600), sized("b", 8400, 500)]
    budget = budget_of("pressure", workloads, 10)
    assert (budget.pool_tokens, budget.cold_bytes) == (1000, 10_000)
    for name in ALL_ARMS:
        arm = Arm.parse(name)
        slots = budget.slots(arm, equal_bytes=True)
        assert slots * 10 + (budget.cold_bytes if arm.has_cold_tier else 0) == 20_000
    assert budget_of("pressure-2", workloads, 10).total_bytes == 40_000


def test_the_pool_holds_the_longest_history():
    budget = budget_of("pressure", [sized("a", 8000, 1300)], 10)
    assert budget.total_bytes == 20_000
    assert 1300 < budget.pool_tokens < 1500
    # too few sessions: more bytes than asked for, until nothing is under pressure
    budget = budget_of("pressure", [sized("a", 4000, 1300)], 10)
    assert (budget.total_bytes, budget.pool_tokens) == (19_260, 1445)
    with pytest.raises(BenchError, match=r"too few .* larger --scale"):
        budget_of("pressure", [sized("a", 2000, 1300)], 10)


def test_all_of_it_fits():
    budget = budget_of("fits", [sized("a", 8000, 600), sized("b", 9000, 500)], 10)
    assert budget.pool_tokens > 9000 * 1.25
    assert budget.cold_bytes == budget.pool_tokens * 10


@pytest.mark.parametrize("name", ["", "press", "pressure-", "pressure-1", "pressure-x", "fits-2", "as-is"])
def test_other_conditions_are_refused(name):
    with pytest.raises(ValueError, match="is unknown: pressure, fits"):
        factor_of(name)


@pytest.mark.parametrize(
    ("pressure", "fits", "expected"),
    [
        (None, False, ["pressure", "fits"]), ([], False, ["pressure"]), (None, True, ["fits"]),
        ([8, 4.0, 2], True, ["pressure-8", "pressure", "pressure-2", "fits"]), ([2.5], False, ["pressure-2.5"]),
    ],
)  # fmt: skip
def test_conditions_of_the_command_line(pressure, fits, expected):
    assert _conditions(pressure, fits) == expected


def test_the_order_is_rotated():
    order = schedule(ARMS, ["pressure", "fits"], 3)
    assert len(order) == len(set(order)) == 18
    assert order[0] == (0, "pressure", "plt-dense")  # which may lack its profile
    for condition in ("pressure", "fits"):
        for place in range(3):  # every arm has been at every place
            runs = [[arm for r, c, arm in order if (r, c) == (repeat, condition)] for repeat in range(3)]
            assert {run[place] for run in runs} == set(ARMS)
    assert schedule(["default"], ["fits"], 2) == [(0, "fits", "default"), (1, "fits", "default")]
    workloads = [sized("a", 1, 1), sized("b", 1, 1)]
    assert [w.name for w in rotated(workloads, 1)] == ["b", "a"]


def test_the_arms_are_known():
    assert {Arm.parse(name).name for name in ALL_ARMS} == set(ALL_ARMS) >= set(ARMS)


def test_the_demo_model_under_pressure(demo_model_dir):
    tokenizer = ModelTokenizer(demo_model_dir)
    workloads = [Sized.make(name, tokenizer, 1.0, 0) for name in SIZED]
    plan = Plan.make(demo_model_dir, workloads, ["pressure", "fits"], on_gpu=False)
    for workload in workloads:
        tokens = {name: budget.total_bytes / budget.row_bytes for name, budget in plan.budgets.items()}
        assert 4 <= workload.working_set / tokens["pressure"] < 4.5
        assert workload.working_set < plan.budgets["fits"].pool_tokens
        assert workload.longest < plan.budgets["pressure"].pool_tokens
        parents = [session.parent is None for session in workload.sessions]
        assert parents == sorted(parents, reverse=True)
    args = plan.server(Arm.parse("default"), "pressure").args
    assert args[args.index("--max-total-tokens") + 1] == str(int(tokens["pressure"]))
