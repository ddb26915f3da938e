"""The client against a small server of our own that streams, errs, hangs and hangs up."""

import time

import pytest

from bench_serving.arrivals import ClosedLoop, Poisson, RoundRobin, Timestamps, start_times
from bench_serving.client import Options, play
from bench_serving.streams import Completions, Generate
from bench_serving.workloads import Session, Turn
from tests.bench_serving.fake_server import (
    ABORT,
    ERROR,
    GAP_S,
    HANG,
    HANG_UP,
    NOT_JSON,
    SLOW,
    STATUS,
    UNFINISHED,
)


def session(name, *firsts, new=3, **more):
    return Session(name, tuple(Turn((first, 0), new) for first in firsts), **more)


def records_of(result):
    return {(record.session, record.turn): record for record in result.records}


def test_a_session_grows_by_its_answers(fake):
    seen = []
    result = play([session("a", 50, 60, preamble=(90, 91, 92))], Options(fake.url), ClosedLoop(), seen.append)
    first, second = result.records
    assert seen == result.records
    assert fake.asked[0][1] == [90, 91, 92, 50, 0]
    assert first.output_ids == (5, 6, 7)
    assert fake.asked[1][1] == [90, 91, 92, 50, 0, 5, 6, 7, 60, 0]
    assert result.histories["a"] == [*fake.asked[1][1], 10, 11, 12]
    assert (second.prompt_tokens, second.cached_tokens) == (10, 3)
    assert second.cached_tokens_details == {"device": 1, "host": 2}
    for record in result.records:
        assert record.ok
        assert record.ttft_s >= GAP_S
        assert len(record.inter_token_s) == 2
        assert record.e2e_s == pytest.approx(record.ttft_s + sum(record.inter_token_s))
        assert abs(record.started_at - time.time()) < 60


def test_incremental_streams_are_the_same(fake):
    api = Generate()
    api.path = "/incremental"
    result = play([session("a", 50, 60)], Options(fake.url, api), ClosedLoop())
    assert [record.output_ids for record in result.records] == [(2, 3, 4), (7, 8, 9)]


def test_completions_give_the_same_records(fake):
    options = Options(fake.url, Completions("m"))
    result = play([session("a", 50, 60), session("b", UNFINISHED)], options, ClosedLoop())
    found = records_of(result)
    assert found["a", 0].output_ids == (2, 3, 4)
    assert fake.asked[1][1] == [50, 0, 2, 3, 4, 60, 0]
    assert found["a", 1].cached_tokens == 4
    assert found["a", 1].cached_tokens_details == {"device": 1, "host": 3}
    assert len(found["a", 1].inter_token_s) == 2
    assert "does not know return_token_ids" in found["b", 0].error


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (STATUS, "status 500: out of memory"),
        (HANG, "no whole answer after 1.5 s"),
        (HANG_UP, "ClientPayloadError"),
        (ERROR, "no room"),
        (UNFINISHED, "the answer broke off"),
        (NOT_JSON, "an event is not JSON"),
        (ABORT, "aborted: too long"),
    ],
)
def test_a_failure_is_a_record_and_ends_its_session_alone(fake, what, expected):
    sessions = [session("bad", what, 50), session("good", 50, 60), session("child", 70, parent="bad", parent_turns=1)]
    started = time.perf_counter()
    result = play(sessions, Options(fake.url, timeout_s=1.5), ClosedLoop(3))
    assert time.perf_counter() - started < 20
    found = records_of(result)
    assert len(found) == len(result.records) == 5
    assert expected in found["bad", 0].error
    assert found["bad", 0].prompt_tokens == 2
    assert found["bad", 1].error == "not sent: an earlier turn failed"
    assert found["child", 0].error == "not sent: bad failed"
    assert found["good", 0].ok
    assert found["good", 1].ok
    if what != STATUS:
        assert found["bad", 0].output_ids[:1] == (2,)
        assert found["bad", 0].ttft_s > 0


def test_nobody_there():
    result = play([session("a", 50, 60)], Options("http://127.0.0.1:9", warm_up=1), ClosedLoop())
    assert "ClientConnectorError" in result.records[0].error
    assert len(result.records) == 2


def test_round_robin_is_by_turns(fake):
    sessions = [session("a", 50, 51), session("b", 60, 61), session("c", 70, parent="a", parent_turns=1)]
    result = play(sessions, Options(fake.url), RoundRobin())
    assert [(r.session, r.turn) for r in result.records] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 0)]
    assert fake.most_at_once == 1
    assert fake.asked[-1][1] == [50, 0, 2, 3, 4, 70, 0]


def test_children_go_on_from_an_earlier_turn(fake):
    sessions = [
        session("root", 50, 51, 52),
        session("fork", 60, parent="root", parent_turns=1),
        session("sub", 70, parent="fork", parent_turns=1, preamble=(99,)),
        session("twin", 80, parent="root", parent_turns=0),
    ]
    # one place: a child that waited in it for its parent would wait forever
    result = play(sessions, Options(fake.url), ClosedLoop(1))
    assert all(record.ok for record in result.records)
    fork = [50, 0, 2, 3, 4, 60, 0]
    assert result.histories["fork"] == [*fork, 7, 8, 9]
    assert result.histories["sub"][:-3] == [*fork, 7, 8, 9, 99, 70, 0]
    assert result.histories["twin"][:-3] == [80, 0]


def test_a_closed_loop_keeps_its_concurrency(fake):
    play([session(str(i), SLOW) for i in range(6)], Options(fake.url), ClosedLoop(2))
    assert fake.most_at_once == 2


def test_an_open_loop_does_not_wait(fake):
    sessions = [session(str(i), SLOW, start_s=0.04 * i) for i in range(4)]
    play(sessions, Options(fake.url), Timestamps())
    times = [when for when, _ in fake.asked]
    assert fake.most_at_once == 4
    assert times[-1] - times[0] > 0.1  # and not all at once: the first may have come late, the last not early


def test_poisson_times_come_from_the_seed():
    sessions = [session(str(i), 50) for i in range(400)]
    times = start_times(sessions, Poisson(20.0))
    assert times == sorted(times) == start_times(sessions, Poisson(20.0))
    assert times != start_times(sessions, Poisson(20.0, seed=1))
    assert 15 < times[-1] < 26
    assert start_times(sessions, ClosedLoop()) == [0.0] * 400


def test_users_think(fake):
    turns = (Turn((50,), 1), Turn((60,), 1, think_s=0.2))
    play([Session("a", turns)], Options(fake.url), ClosedLoop())
    assert fake.asked[1][0] - fake.asked[0][0] > 0.2


def test_warm_up_is_not_recorded(fake):
    result = play([session("a", 50)], Options(fake.url, warm_up=2), ClosedLoop())
    assert len(result.records) == 1
    assert [len(prompt) for _, prompt in fake.asked] == [16, 16, 2]


def test_what_cannot_be_played_is_refused(fake):
    options = Options(fake.url)
    for sessions, arrivals, expected in (
        ([session("a", 1), session("a", 1)], ClosedLoop(), "two sessions are named a"),
        ([Session("a", ())], ClosedLoop(), "a has no turn"),
        ([session("a", 1, parent="b")], ClosedLoop(), "a needs 0 turns of b"),
        ([session("b", 1), session("a", 1, parent="b", parent_turns=2)], ClosedLoop(), "a needs 2 turns of b"),
        ([session("a", 1)], Timestamps(), "a has no start_s"),
    ):
        with pytest.raises(ValueError, match=expected):
            play(sessions, options, arrivals)
    for make in (lambda: ClosedLoop(0), lambda: Poisson(0)):
        with pytest.raises(ValueError, match="must be"):
            make()
    assert not fake.asked
