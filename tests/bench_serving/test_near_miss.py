"""The near-miss benchmark: its prompts, and what it makes of a server's answers."""

import numpy as np
import pytest

from bench_serving import near_miss
from bench_serving.near_miss import OFF, ON, measure_divergence, measure_times
from bench_serving.near_miss_prompts import Prompts
from bench_serving.workloads import ModelTokenizer
from sglang_plt.near_miss import Limits, plan_spans


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir):
    return ModelTokenizer(demo_model_dir)


class Server:
    """Answers at once, and says that with reuse all but 60 tokens were found."""

    def __init__(self):
        self.asked = []

    def post_json(self, path, payload):
        ids, custom = payload["input_ids"], payload["sampling_params"]["custom_params"]
        self.asked.append((len(ids), custom))
        reused = len(ids) - 60 if custom == ON else 0
        meta = {"cached_tokens": reused, "cached_tokens_details": {"device": 0, "host": 0, "near_miss": reused}}
        if payload.get("return_logprob"):
            top = [[-0.1, 1, None], [-3.0, 2, None]] if custom == OFF else [[-0.1, 1, None], [-3.1, 2, None]]
            meta["input_top_logprobs"] = [None, *[top] * (len(ids) - payload["logprob_start_len"] - 1)]
            meta["output_top_logprobs"] = [top]
        return {"meta_info": meta}


def test_variants_are_near_misses_and_each_is_new(tokenizer):
    prompts = Prompts(tokenizer, 800, 3)
    variants = [prompts.variant() for _ in range(4)]
    assert len({tuple(ids) for ids in variants}) == 4
    for ids in variants:
        assert len(ids) == len(prompts.donor) == 800
        spans = plan_spans(
            np.array(prompts.donor), np.array(ids), 0, 1, Limits(max_difference=0.05, max_difference_before=0.5)
        )
        assert sum(map(len, spans)) > 650
        assert spans[0].start < 100


def test_an_exact_hit_has_as_many_new_tokens_as_were_asked_for(tokenizer):
    prompts = Prompts(tokenizer, 700, 0)
    ids = prompts.exact_hit(64)
    assert ids[:636] == prompts.donor[:636]
    assert len(ids) == 700
    assert ids != prompts.exact_hit(64)
    assert prompts.unrelated()[:50] != prompts.donor[:50]


def test_rows(tokenizer):
    server, prompts = Server(), Prompts(tokenizer, 700, 0)
    rows = measure_times(server, prompts, 3, np.random.default_rng(0)) + measure_divergence(server, prompts, 200)
    found = {row.metric: row for row in rows}
    assert {row.arm for row in rows} == {"near_duplicates/700"}
    assert found["grafted_share"].value == pytest.approx(640 / 700)
    assert found["ttft_ratio_vs_off"].lo <= found["ttft_ratio_vs_off"].value <= found["ttft_ratio_vs_off"].hi
    assert found["kl"].value > 0
    assert found["kl"].n == 256
    assert found["argmax_agreement"].value == 1
    assert {custom["plt_near_miss"] for _, custom in server.asked} == {"on", "off"}


@pytest.mark.parametrize("argument", [["--prompt-tokens", "100"], ["--rounds", "1"], ["--json", "/no/such/dir/x.json"]])
def test_wrong_arguments_are_refused(argument, capsys):
    with pytest.raises(SystemExit):
        near_miss.main(argument)
    assert "near_miss: error:" in capsys.readouterr().err


def test_plot_is_written(tmp_path):
    near_miss.plot([(1e-4, 2e-4), (3e-4, 1e-4)], tmp_path / "deviation.png")
    assert (tmp_path / "deviation.png").read_bytes().startswith(b"\x89PNG")
