# Each target makes .venv and installs what it needs, once; again only after pyproject.toml or constraints.txt changed.

PYTHON ?= python3
ARGS ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
METADATA := pyproject.toml constraints.txt

.PHONY: bench check clean demo help nccl-check test thorough

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | while IFS='|' read -r target text; do \
	    printf '  make %-10s %s\n' "$$target" "$$text"; done
	@echo
	@echo '  PYTHON=python3.12   the interpreter that .venv is made of (3.10 or newer)'
	@echo '  ARGS="..."          passed on: make test ARGS="-k ring", make demo ARGS="--help"'

demo: $(VENV)/installed-demo ## train a small network on 4 ranks, then compare the five algorithms on its gradients
	@$(VENV_PYTHON) -m microddp demo $(ARGS)

test: $(VENV)/installed-dev ## run the tests
	@$(VENV_PYTHON) -m pytest -m "not docs" $(ARGS)

check: $(VENV)/installed-dev $(VENV)/installed-cupy ## what a change must pass: lint, format, types, tests, the commands of the documentation
	@scripts/check $(VENV_PYTHON)

thorough: $(VENV)/installed-dev ## all plans, and twenty times the random examples (half an hour)
	@MICRODDP_THOROUGH=1 MICRODDP_HYPOTHESIS=thorough $(VENV_PYTHON) -m pytest -m "not docs" --timeout 3600 \
	    tests/plan tests/test_matrix_thread.py tests/test_matrix_gloo.py $(ARGS)

nccl-check: $(VENV)/installed-dev $(VENV)/installed-cupy ## everything about the GPU path that needs no GPU (minutes)
	@scripts/nccl_check $(VENV_PYTHON) $(ARGS)

bench: $(VENV)/installed-bench ## compare the speed with torch's own all-reduce over Gloo (minutes)
	@$(VENV_PYTHON) bench/bench_all_reduce.py $(ARGS)

clean: ## remove .venv and everything that tools have cached
	@rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_PYTHON):
	@scripts/make_venv "$(PYTHON)" "$(VENV)"

# CuPy's NCCL bindings run without a GPU over a stand-in for NCCL. A CuPy that is there already is left as it is.
$(VENV)/installed-cupy: $(METADATA) | $(VENV)/installed-dev
	@if ! $(VENV_PYTHON) -c 'import cupy' 2>/dev/null; then \
	    $(VENV_PYTHON) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,cuda12]'; fi
	@touch $@

# One call of pip resolves everything together: a call without the constraints could draw another build of torch.
$(VENV)/installed-%: $(METADATA) | $(VENV_PYTHON)
	@echo 'Installing microddp[$*] into $(VENV), once; the first time takes a minute or more.'
	@$(VENV_PYTHON) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@
	@if [ '$*' = dev ]; then touch $(VENV)/installed-demo $(VENV)/installed-bench; fi  # dev holds both
