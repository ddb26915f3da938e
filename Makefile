PY := .venv/bin/python
JSON_ARG = $(if $(JSON),--json $(JSON))
OUTPUT_ARG = $(if $(OUTPUT),--output $(OUTPUT))
ARMS_ARG = $(if $(ARMS),--arms $(ARMS))

.DEFAULT_GOAL := help
.PHONY: help env lock demo-model test check demo bench bench-full bench-overhead bench-restore bench-fleet bench-fleet-full bench-near-miss kernels

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## make .venv from requirements.txt; does nothing when it is up to date
	@scripts/env.sh

lock: ## resolve requirements.in into requirements.txt; LOCK_ARGS=--upgrade for newer versions
	@scripts/env.sh uv pip compile --quiet --python-version 3.11 --generate-hashes --no-header --no-annotate \
		$(LOCK_ARGS) requirements.in -o requirements.txt

demo-model: env ## fetch the model of the demo and the tests into .cache/demo-model (once, half a minute)
	@.venv/bin/sglang-plt demo-model

test: demo-model ## run the tests; PYTEST_ARGS="tests/cli -k help" passes arguments on
	@echo "test: running pytest; tests that start a server take one to two minutes to bring it up" >&2
	@$(PY) -m pytest $(PYTEST_ARGS)

check: env ## lint, formatting, import contracts, types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports
	@.venv/bin/mypy

demo: env ## show the plug-in against SGLang's own cache; JSON=FILE also writes the numbers
	@.venv/bin/sglang-plt demo $(JSON_ARG)

bench: env ## caches side by side at equal bytes, 20 minutes; OUTPUT=DIR keeps it there, JSON=FILE also writes the numbers
	@$(PY) -m bench_serving.bench $(OUTPUT_ARG) $(JSON_ARG)

bench-full: env ## the same with all codecs and policies, more sessions, three amounts of memory, two repeats: half a day
	@$(PY) -m bench_serving.bench --arms all --scale 2 --pressure 8 4 2 --fits --repeats 2 $(OUTPUT_ARG) $(JSON_ARG)

bench-overhead: env ## what the cache costs when it does not help; JSON=FILE also writes the numbers
	@$(PY) -m bench_serving.overhead $(JSON_ARG)

bench-restore: env ## restore against prefill; JSON=FILE also writes the numbers
	@$(PY) -m bench_serving.restore $(JSON_ARG)

bench-fleet: env ## near-identical agents, 16 sessions of 2 turns; ARMS="radix dense" runs a part, JSON=FILE writes the numbers
	@$(PY) -m bench_serving.fleet --sessions 16 --turns 2 $(ARMS_ARG) $(JSON_ARG)

bench-fleet-full: env ## the same with 32 sessions of 4 turns
	@$(PY) -m bench_serving.fleet --sessions 32 --turns 4 $(ARMS_ARG) $(JSON_ARG)

bench-near-miss: env ## prompts that differ by a date and a name, reuse beside computing; PLOT=FILE draws, JSON=FILE writes the numbers
	@$(PY) -m bench_serving.near_miss $(JSON_ARG) $(if $(PLOT),--plot $(PLOT))

kernels: env ## compile every Triton kernel without a GPU and hold it to the report; KERNELS_ARGS=--update rewrites that
	@$(PY) -m triton_ops.report $(KERNELS_ARGS)
