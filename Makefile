# Leeway. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds the CPU build of torch, unless its own configuration provides one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# `docker build`, `podman build`, `buildah build`, or any command with the same arguments.
IMAGE_BUILD ?= docker build
IMAGE_VARIANT ?= cpu
IMAGE_PREFIX ?=
IMAGE_TAG ?= dev
IMAGE_ARGS ?=
PYTEST_ARGS ?=
# Tests in parallel. With more workers than cores, an engine can take longer to start than vLLM waits for it.
TEST_WORKERS ?= 2

# The tests start about a hundred processes, which share their compiled modules.
unexport PYTHONDONTWRITEBYTECODE

UV_LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--annotation-style line

.PHONY: help setup quickstart test test-fast test-slow test-cluster lint format bench docs chart images lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.stamp-project ## create .venv from requirements/cpu.lock (about 2 minutes once, then instant)

$(VENV)/.stamp-deps: requirements/cpu.lock requirements/torch-cpu.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_INDEX="$(TORCH_INDEX)" scripts/setup.sh deps
	@touch $@

$(VENV)/.stamp-tools: $(VENV)/.stamp-deps requirements/chart-tools.txt scripts/chart_tools.py
	@rm -rf "$(VENV)/chart-tools"
	@$(BIN)/python scripts/chart_tools.py "$(VENV)/chart-tools"
	@touch $@

$(VENV)/.stamp-project: $(VENV)/.stamp-deps $(VENV)/.stamp-tools pyproject.toml
	@VENV="$(VENV)" scripts/setup.sh project
	@touch $@

quickstart: setup ## train SmolLM2-135M on this machine, with every service (about 10 minutes)
	@$(BIN)/leeway run examples/quickstart.yaml

lint: setup ## run ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## format, and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

test: setup ## run lint, types and all tests that need neither a GPU nor a cluster (16 minutes on 2 cores)
	@$(BIN)/pytest -n $(TEST_WORKERS) -m "not slow and not gpu and not cluster" $(PYTEST_ARGS)

test-fast: setup ## run the unit tests that take less than a few seconds (a minute on 2 cores)
	@$(BIN)/pytest -q -n logical -m "not thorough and not slow and not gpu and not cluster" tests/unit $(PYTEST_ARGS)

test-slow: setup ## run the tests marked slow
	@$(BIN)/pytest -m "slow and not gpu and not cluster" $(PYTEST_ARGS)

test-cluster: setup ## run the tests that need a Kubernetes cluster
	@$(BIN)/pytest -m cluster tests/cluster $(PYTEST_ARGS)

bench: setup ## run the benchmarks
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

chart: setup ## regenerate the chart's schema, default values and README
	@$(BIN)/python charts/schema/build.py

docs: setup ## regenerate the generated pages and build the site into site/
	@$(BIN)/python docs/build.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html written"

images: ## build the container images (IMAGE_VARIANT=cpu or cuda)
	@for name in controller trainer sampler; do \
		echo "== leeway-$$name:$(IMAGE_TAG) ($(IMAGE_VARIANT))"; \
		$(IMAGE_BUILD) -f "Dockerfiles/$$name.Dockerfile" -t "$(IMAGE_PREFIX)leeway-$$name:$(IMAGE_TAG)" \
			--build-arg VARIANT=$(IMAGE_VARIANT) \
			--build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
			--build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
			--build-arg CREATED=$$(git log -1 --format=%cI 2>/dev/null || echo unknown) $(IMAGE_ARGS) .; \
	done

lock: ## resolve requirements/*.in into the lock files (needs the network)
	@test -x $(BIN)/uv || $(MAKE) setup
	@$(UV_LOCK) --excludes requirements/excludes.txt requirements/cpu.in -o requirements/cpu.lock $(LOCK_ARGS)
	@$(UV_LOCK) requirements/gpu.in -o requirements/gpu.lock $(LOCK_ARGS)

clean: ## remove the virtual environment, caches and the built site
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info shared/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
