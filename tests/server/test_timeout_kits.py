"""SGLang's kits of requests that time out, in a queue or while they run, with and without a prefix to restore."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang.test.kits.abort_timeout_kit import RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin

from sglang_plt.client import RequestError
from tests.server.conftest import Case, running, server_args

POOL_TOKENS = 32768  # both waves are admitted at once
WAITING_S, RUNNING_S = 0.5, 6


@pytest.fixture(scope="module")
def server(tiny_llama_dir):
    args = server_args(tiny_llama_dir, POOL_TOKENS, "--plt-codec", "raw", "--plt-cold-fraction", "2")
    env = {"SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_S), "SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_S)}
    with running(args, **env) as server:
        yield server


class TestWaitingTimeout(Case, WaitingTimeoutMixin):
    """About two seconds of tokens; its need of ``--max-running-requests 1`` is met for its time only."""

    waiting_timeout_max_new_tokens = 400

    @pytest.fixture(autouse=True)
    def _one_at_a_time(self, _attach):
        self._set_limit(1)
        yield
        self._set_limit(16)

    def _set_limit(self, requests):
        payload = {"server_args": {"pp_max_micro_batch_size": requests}}
        assert self.server.post_json("/set_internal_state", payload) == [True]


class TestRunningTimeout(Case, RunningTimeoutTwoWaveMixin):
    """Both waves as they are; more tokens, so that all of them time out."""

    running_timeout_sleep = 1
    running_timeout_max_new_tokens = 2500

    def test_running_timeout_no_crash(self):
        before = self._num_timeouts()
        super().test_running_timeout_no_crash()
        assert self._num_timeouts() - before == 16

    def _num_timeouts(self):
        return self.server.log_text().count('"POST /generate HTTP/1.1" 503')


class TestTimeoutOfRestored(Case):
    """Not a kit: what times out, running or queued, has a prefix to restore."""

    def test_timeouts(self):
        rng = random.Random(0)
        prompts = [[rng.randrange(1000, 40000) for _ in range(3000)] for _ in range(12)]

        def send(prompt, max_new_tokens):
            sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
            try:
                self.server.post_json("/generate", {"input_ids": prompt, "sampling_params": sampling})
            except RequestError as error:
                return error.status
            return 200

        assert [send(prompt, 4) for prompt in prompts] == [200] * len(prompts)
        before = self.restored_tokens()
        with ThreadPoolExecutor(len(prompts)) as executor:
            status = list(executor.map(send, prompts, [1000] * len(prompts)))
        assert 503 in status
        assert set(status) <= {200, 503}
        assert self.restored_tokens() > before
