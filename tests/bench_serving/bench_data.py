"""A hand-made benchmark: three arms, two conditions, requests that take what they should."""

from bench_serving.bench_files import Directory, Note, Run
from bench_serving.records import Record

WORKING_SET = 4000
TTFT = {
    ("default", "pressure"): 1.0,
    ("plt-raw", "pressure"): 0.9,
    ("plt-dense", "pressure"): 0.25,
    ("default", "fits"): 0.2,
    ("plt-raw", "fits"): 0.2,
    ("plt-dense", "fits"): 0.201,
}
SHARE = {"default": 0.2, "plt-raw": 0.25, "plt-dense": 0.7}


def records(ttft, share, sessions=4, turns=3, failed=(), slower=0.0):
    """One request after the other; a turn adds 100 tokens, an answer has 4 and takes a second; gives ``ttft`` again.

    The time to the first token is 2 s for a first turn, ``ttft * (1 + 0.1 * session) + slower`` for the others.
    """
    found, now, asked = [], 1000.0, [0] * sessions
    for turn in range(turns):
        for index in range(sessions):
            asked[index] += 100
            time = ttft * (1 + 0.1 * index) + slower if turn else 2.0
            if (index, turn) in failed:
                found.append(Record(f"s{index}", turn, asked[index], now, 1.0, error="status 500"))
                now += 1.0
                continue
            cached = round(share * asked[index]) if turn else 0
            details = {"device": cached}
            found.append(
                Record(f"s{index}", turn, asked[index], now, time + 1, time, (1 / 3,) * 3, (7,) * 4, cached, details)
            )
            asked[index] += 4
            now += time + 1
    return found


def make_run(arms=("default", "plt-raw", "plt-dense")):
    sizes = {"pool_tokens": 500, "cold_bytes": 50_000, "row_bytes": 100}
    fits = {"pool_tokens": 5000, "cold_bytes": 500_000, "row_bytes": 100}
    return Run(
        ["Model: none <really>."],
        "--output somewhere",
        {"chat": {"sessions": 4, "requests": 12, "working_set": WORKING_SET, "longest": 312}},
        {"pressure": sizes, "fits": fits},
        list(arms),
    )


def make_directory(root, repeats=1, slow_probe=None):
    """All of it on disk; the server ``slow_probe`` was disturbed."""
    run, directory = make_run(), Directory(root)
    for repeat in range(repeats):
        for (arm, condition), ttft in TTFT.items():
            share = SHARE[arm] if condition == "pressure" else 0.8
            directory.write(("chat", arm, condition), repeat, records(ttft, share, slower=0.001 * repeat))
            probe = 0.13 if arm == slow_probe else 0.1
            seconds = {"chat": {"evict": 0.012, "restore": 0.08}} if arm != "default" else {}
            run.notes.append(Note(repeat, condition, arm, [0.1, probe], [0.5, 1.5], 0.01, True, seconds))
    directory.write_run(run)
    return run
