# Every target bootstraps .venv by itself; the only things needed are Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODELS := .loraplane/models
export UV_PYTHON_DOWNLOADS := never
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install model demo up down check lint types imports drift test bench-engine pins clean

help: ## Show what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.stamp ## Install everything, hash-checked, into .venv

$(VENV)/.stamp: requirements/all.txt requirements/uv.txt pyproject.toml
	@echo "installing into $(VENV) (about half a minute the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q --require-hashes -r requirements/uv.txt
	@$(BIN)/uv pip sync -q --python $(BIN)/python --require-hashes requirements/all.txt
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

