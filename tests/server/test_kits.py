"""SGLang's own test kits, as they ship in its wheel, against a server on this cache: see each class for what is scaled.

The pool is smaller than what the kits work on, so that they run through demotion and restore all the time.
"""

import json
import random

import pytest
import requests
from sglang.test import kl_test_utils
from sglang.test.kits import basic_scheduler_stress_kit as stress_kit
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from transformers import AutoTokenizer

from tests.server.conftest import Case, make_text, running, server_args

POOL_TOKENS = 4096
COMMON = ("--plt-codec", "raw", "--plt-cold-fraction", "8", "--chunked-prefill-size", "512")


@pytest.fixture(scope="module", params=[(1, "lru"), (16, "value")], ids=["page1-lru", "page16-value"])
def server(request, tiny_llama_dir):
    page_size, policy = request.param
    args = server_args(tiny_llama_dir, POOL_TOKENS, *COMMON, "--page-size", str(page_size), "--plt-policy", policy)
    with running(args) as server:
        server.page_size, server.policy = page_size, policy
        yield server


class TestRadixTree(Case):
    """300 nodes instead of 400, with runs of up to 64 tokens instead of 256; the tree is sent twice."""

    def test_radix_tree(self, monkeypatch):
        gen = radix_cache_server_kit.gen_radix_tree
        monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", lambda: gen(num_nodes=300, chunk_len=64))
        before = self.restored_tokens()
        for _ in range(2):
            random.seed(1)
            radix_cache_server_kit.run_radix_attention_test(self.base_url)
        assert self.restored_tokens() > before


class TestCacheHit(Case):
    """The kit demands that every round finds all of the one before. Here that is possible only with a cold tier."""

    def test_multiturn(self, tmp_path):
        rng = random.Random(0)
        dataset = tmp_path / "sharegpt.json"
        dataset.write_text(json.dumps([{"conversations": [{"value": make_text(rng, 300)}] * 2} for _ in range(40)]))
        before = self.restored_tokens()
        result = run_multiturn_cache_hit_test(
            self.base_url,
            self.model,
            num_clients=10,
            num_rounds=3,
            request_length=192,
            output_length=16,
            dataset_path=str(dataset),
            max_parallel=2,
        )
        assert result["overall"]["total_prompt_tokens"] > 2 * POOL_TOKENS
        # what ``value`` leaves on the device depends on what it has learned by then
        assert self.restored_tokens() - before > POOL_TOKENS / (2 if self.server.policy == "lru" else 8)


class TestPrefixCacheBranching(Case, PrefixCacheBranchingMixin):
    """The kit itself is for Mamba models, whose state can be reused only where it was checkpointed: it demands that the
    second request misses, which SGLang's own radix cache for attention does not fulfil either. Its requests are sent,
    and every one must find exactly the common prefix.
    """

    cache_chunk_size = 16

    def test_prefix_cache_branching(self):
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        texts = ["hi" * 257 + suffix * self.cache_chunk_size * 4 for suffix in ("this", "here", "that")]
        ids = [tokenizer.encode(text) for text in texts]
        for index, text in enumerate(texts):
            common = max((_common_len(ids[index], earlier) for earlier in ids[:index]), default=0)
            found = self.send_request_helper(text)["meta_info"]
            assert found["prompt_tokens"] == len(ids[index])
            assert found["cached_tokens"] == common - common % self.server.page_size


def _common_len(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TestKLDivergence(Case, KLDivergenceMixin):
    """24 prompts of 160 to 300 tokens from our own text instead of 32 of about 3000 from LongBench; 16 new tokens."""

    kl_div_thres = 1e-9  # restored rows are exact, what remains is the order of float32 sums
    kl_div_max_samples = 24
    kl_div_prefill_max_new_tokens = 16
    kl_div_decode_max_new_tokens = 16

    @pytest.fixture(autouse=True)
    def _prompts(self, tiny_llama_dir, tmp_path, monkeypatch):
        rng = random.Random(0)
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
        samples = kl_test_utils.DEFAULT_NUM_SAMPLES
        prompts = [tokenizer.encode(make_text(rng, 400))[: rng.randrange(160, 300)] for _ in range(samples)]
        name = str(tiny_llama_dir).replace("/", "_")
        cached = tmp_path / f"input_ids_{name}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{samples}.json"
        cached.write_text(json.dumps(prompts))
        monkeypatch.setattr(kl_test_utils, "CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(kl_test_utils, "_cached_input_ids", {})
        before = self.restored_tokens()
        yield
        assert self.restored_tokens() > before


class TestBasicSchedulerStress(Case, stress_kit.BasicSchedulerStressMixin):
    """Each probe runs after its prompts were served and, by ``lru``, pushed out of the pool. The kit asks for capitals;
    a model with random weights has to repeat what it answered when it was asked alone. The long prompt has 300 of 800
    sentences: it must fit the context.
    """

    sanity_max_new_tokens_short = 16
    filler = "the quick brown fox jumps over the lazy dog. "

    @pytest.fixture(autouse=True)
    def _served_before(self, _attach, request, monkeypatch):
        prefix, questions = stress_kit._CONCURRENT_PREFIX, [question for question, _ in stress_kit._CONCURRENT_QA]
        answers = [self._stress_generate(prefix + question, 16).lower() for question in questions]
        assert len(set(answers)) == len(answers)
        monkeypatch.setattr(stress_kit, "_CONCURRENT_QA", list(zip(questions, answers, strict=True)))
        self.answer = self._stress_generate(questions[0], 16)
        self._stress_generate(self.filler * 300, 1)
        self._stress_generate(make_text(random.Random(0), POOL_TOKENS - 100), 1)
        before = self.restored_tokens()
        yield
        if self.server.policy == "lru":  # ``value`` may have kept them
            assert self.restored_tokens() > before

    def assertIn(self, member, container):
        assert member == "paris"
        assert container == self.answer.lower()

    def _stress_generate(self, prompt, max_new_tokens):
        prompt = prompt.removeprefix("Read the following text and then answer.\n")
        return super()._stress_generate(prompt.replace(self.filler * 800, self.filler * 300), max_new_tokens)


class TestAbortAll(Case, AbortAllMixin):
    """20 requests instead of 32: more than run at a time, so both queues are aborted."""

    abort_all_num_requests = 20
    abort_all_max_new_tokens = 3000


class TestAbortOfLongPrompts(Case):
    """Not a kit: clients that hang up while their prompt is prefilled in chunks, some with a prefix to restore."""

    def test_disconnect(self):
        rng = random.Random(0)
        prompts = [[rng.randrange(1000, 40000) for _ in range(1500)] for _ in range(6)]
        for length in (700, 1500):
            for prompt in prompts:
                with pytest.raises(requests.exceptions.ReadTimeout):
                    requests.post(
                        self.base_url + "/generate",
                        json={
                            "input_ids": prompt[:length],
                            "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
                        },
                        timeout=0.3,
                    )
        requests.post(self.base_url + "/abort_request", json={"abort_all": True}, timeout=10).raise_for_status()
