# What there is to run in this repository. `make` alone prints the list.
#
# A fresh machine needs Python 3.11, 3.12 or 3.13 (with venv), make and a C compiler; `setup` does the rest, in .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
STAMP := .venv/.setup-done
MODELS_STAMP := .venv/.test-models-done
HELM_STAMP := .venv/.test-helm-done
BROWSER_STAMP := .venv/.test-browser-done
PYTEST := $(BIN)/python -m pytest
# Tests that start no clusters run side by side, so many at once; clusters have all cores to themselves.
WORKERS ?= 2
BESIDE := -n $(WORKERS) --dist worksteal

.PHONY: help demo serve test check lint test-slow setup clean

help: ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: setup ## Start a cluster, ask it over gRPC and HTTP, show where the time went, shut it down.
	@$(BIN)/disagg demo

serve: setup ## Run a cluster on this machine until Ctrl-C (other flags: .venv/bin/disagg up --help).
	@$(BIN)/disagg up

test: lint $(MODELS_STAMP) $(HELM_STAMP) $(BROWSER_STAMP) ## What CI runs: lint, types, import contracts, and every test that is not slow.
	$(PYTEST) $(BESIDE) -m "not slow and not short and not cluster"
	$(PYTEST) -m "cluster and not slow and not short"

check: lint $(HELM_STAMP) ## The short part of `test`: no real clusters, and fewer examples of what takes long.
	$(PYTEST) $(BESIDE) -m "not slow and not cluster and not long"

lint: setup ## Ruff, mypy and the import contracts.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: setup $(MODELS_STAMP) ## The tests that are too slow for CI.
	$(BIN)/python -m tests.slow

setup: $(STAMP) ## Make .venv with everything that is needed (again only if what it is made from has changed).

clean: ## Remove .venv, generated code and caches.
	rm -rf .venv disagg/v1 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find disagg tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(shell find protos -type f)
	@.ci/setup
	@touch $@

$(MODELS_STAMP): $(STAMP)
	@.ci/test-models
	@touch $@

$(HELM_STAMP): $(STAMP) .ci/test-helm
	@$(BIN)/python .ci/test-helm
	@touch $@

$(BROWSER_STAMP): $(STAMP) .ci/test-browser
	@$(BIN)/python .ci/test-browser
	@touch $@
