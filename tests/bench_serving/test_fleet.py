"""The fleet benchmark: arms and their memory, its table, and one server measured end to end."""

import pytest

from bench_serving import fleet
from bench_serving.fleet_runs import Plan, Reference, measuring_run, probe, refuse_without_profile, run_phases
from bench_serving.servers import Arm, Budget, quarter_budget, server_args, values_a_token
from bench_serving.workloads import ModelTokenizer
from bench_serving.workloads.fleet import Fleet
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.results import Row

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def flag(args, name):
    return args[args.index(name) + 1]


@pytest.mark.parametrize(
    ("name", "codec", "policy", "delta"),
    [
        ("default", None, None, False), ("sglang-lfu", None, "lfu", False), ("plt-raw", "raw", None, False),
        ("plt-dense-lru", "dense", "lru", False), ("plt-dense-tight", "dense-tight", None, False),
        ("plt-dense-tight-value", "dense-tight", "value", False), ("plt-dense+delta", "dense", None, True),
        ("plt-fast+delta-lru", "fast", "lru", True),
    ],
)  # fmt: skip
def test_arms_by_name(name, codec, policy, delta):
    assert Arm.parse(name) == Arm(name, codec, policy, delta)


@pytest.mark.parametrize("name", ["", "radix", "plt", "plt-", "plt-int3", "plt-int8-", "plt-int8lru", "sglang-value"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is unknown: default, sglang-POLICY"):
        Arm.parse(name)


def test_short_names():
    for name, whole in (("radix", "default"), ("raw", "plt-raw"), ("plt-raw", "plt-raw"), ("sglang-lfu", "sglang-lfu")):
        assert fleet.parse_arm(name).name == whole


def test_flags():
    assert Arm.parse("default").flags() == []
    assert Arm.parse("sglang-slru").flags() == ["--radix-eviction-policy", "slru"]
    assert Arm.parse("plt-dense-lru").flags()[:6] == ["--radix-cache", "plt", "--plt-codec", "dense", "--plt-policy", "lru"]  # fmt: skip # noqa: E501
    for codec in (*CODECS, *PROFILED):
        assert flag(Arm.parse(f"plt-{codec}").flags(), "--plt-delta") == "off"
        assert flag(Arm.parse(f"plt-{codec}+delta").flags(), "--plt-delta") == "on"


def test_equal_slots_and_equal_bytes(tmp_path):
    budget = Budget(1000, 50_000, 100)
    ours, theirs = Arm.parse("plt-raw"), Arm.parse("default")
    assert budget.total_bytes == 150_000
    assert (budget.slots(ours, equal_bytes=True), budget.slots(theirs, equal_bytes=True)) == (1000, 1500)
    assert (budget.slots(ours, equal_bytes=False), budget.slots(theirs, equal_bytes=False)) == (1000, 1000)
    args = server_args(ours, tmp_path, budget, on_gpu=False, equal_bytes=True, more=("--x",))
    assert (flag(args, "--max-total-tokens"), flag(args, "--plt-cold-bytes")) == ("1000", "50000")
    assert args[-1] == "--x"
    assert (flag(args, "--device"), flag(args, "--dtype")) == ("cpu", "float32")
    args = server_args(theirs, tmp_path, budget, on_gpu=True, equal_bytes=True, more=("--x",))
    assert flag(args, "--max-total-tokens") == "1500"
    assert not any(arg.startswith(("--plt", "--x", "--device")) for arg in args)


def test_a_quarter_of_the_working_set():
    budget = quarter_budget(2000, 40_000, 10)
    assert budget.slots(Arm("default"), equal_bytes=True) == 10_000
    assert budget.cold_bytes == budget.pool_tokens * 10
    assert quarter_budget(2000, 6000, 10).pool_tokens > 2000  # one session must fit


def test_values_a_token(demo_model_dir, tmp_path):
    assert values_a_token(demo_model_dir) == 2 * 30 * 3 * 64
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    with pytest.raises(ValueError, match="MLA"):
        values_a_token(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="num_attention_heads"):
        values_a_token(tmp_path)


def test_a_codec_that_still_learns_is_refused():
    class Server:
        def log_text(self):
            return "PLT cache: codec=int8/1 (keys without RoPE; dense after 65536 tokens) cold_budget=1"

    with pytest.raises(RuntimeError, match="plt-dense has no profile: run sglang-plt calibrate"):
        refuse_without_profile(Server(), Arm.parse("plt-dense"))
    refuse_without_profile(Server(), Arm.parse("plt-int8"))


def test_the_table_keeps_the_measurements_apart():
    rows = [
        Row("pool_tokens", "fleet", 9, "tokens"),
        Row("hit_rate", "dense", 0.5, "1"),
        Row("bf16_over_bytes_template", "dense", 12.345, "1"),
        Row("hit_rate", "dense@equal-bytes", 0.25, "1"),
    ]
    header, first, second, *_ = fleet.table(rows).splitlines()
    assert first.split() == ["dense", "12.35", "-", "-", "50.0%", "-", "-", "-"]
    assert second.split() == ["dense@equal-bytes", "-", "-", "-", "25.0%", "-", "-", "-"]
    assert header.index("hit rate") + len("hit rate") == first.index("50.0%") + len("50.0%")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--sessions", "0"], "num_sessions=0 must be at least 1"),
        (["--arms", "int3"], "arm 'plt-int3' is unknown"),
        (["--json", "/no/such/dir/x.json"], "/no/such/dir is not a directory"),
    ],
)
def test_wrong_options_end_with_one_line(argv, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        fleet.main(argv)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_one_server_end_to_end(tiny_llama_dir, monkeypatch):
    """Rows that come back exact, counted to the byte; the server is its own reference."""
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    tokenizer = ModelTokenizer(tiny_llama_dir)
    plan = Plan.make(
        tiny_llama_dir, tokenizer, Fleet(3, 1, system_tokens=1300, turn_tokens=40, output_tokens=4), on_gpu=False
    )
    said = []
    with plan.measuring_server(fleet.parse_arm("raw")) as server:
        first = run_phases(plan, server, said.append)
        reference = Reference(first.records, probe(plan, server))
        rows = {row.metric: row for row in measuring_run(plan, server, "raw", reference, said.append)}
    assert rows["failed_share"].value == 0
    assert rows["exact_match"].value == 1
    assert rows["kl_warm_cold"].value < 1e-6
    for what in ("template", "overall"):
        assert rows[f"demoted_share_{what}"].value > 0.999
        # float32 rows and small headers
        assert 0.49 < rows[f"bf16_over_bytes_{what}"].value < 0.5
    assert rows["bf16_over_bytes_overall"].n > rows["bf16_over_bytes_template"].n > 3 * 1290
    assert rows["hit_rate"].value > 0.9
    assert rows["cached_tokens_host"].value > rows["cached_tokens_device"].value
