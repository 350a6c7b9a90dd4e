# `make help` prints this file's targets and variables: the text behind two hashes.
.ONESHELL:
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
unexport PYTHONDONTWRITEBYTECODE
export UV_PYTHON_PREFERENCE ?= system

BIN := .venv/bin
PYTHON ?= ## makes .venv; else the first of python3.11, 3.12, 3.13
KEEP ?= ## make demo KEEP=1: the cluster stays up afterwards
KILL ?= ## make demo KILL=1: a second run, killed and resumed
FABRIC ?= ## make image FABRIC=efa: base, efa or gib
IMAGE ?= ## make image IMAGE=registry.example.com/mine:1
JOBS ?= ## make breaks JOBS=4: breaks at a time, else 2
export PYTHON

.PHONY: help
help: ## this list
	@echo targets
	@awk -F ' *## ' '/^[a-z-]+:.*## / { sub(/:.*/, "", $$1); printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@echo variables
	@awk -F ' *## ' '/^[A-Z]+ \?=.*## / { sub(/ .*/, "", $$1); printf "  %-20s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: .venv/cpu ## train a small model here; leaves nothing running
	@$(BIN)/python -m lab.demo $(if $(KEEP),--keep) $(if $(KILL),--kill)

# .venv

.PHONY: install
install: .venv/cpu ## .venv with the trainer and the local cluster, no GPU
.PHONY: install-client
install-client: .venv/client ## .venv to submit jobs to a cluster elsewhere; also macOS
.PHONY: install-server
install-server: .venv/server ## client, dstack and its server: your own machines
.PHONY: install-aws
install-aws: .venv/aws ## .venv with Pulumi, dstack and boto3 for AWS
.PHONY: install-gcp
install-gcp: .venv/gcp ## .venv with Pulumi, dstack and Google's libraries for GCP
.PHONY: install-clouds
install-clouds: .venv/clouds ## server, for Azure, Kubernetes, Nebius, OCI and Verda too
.PHONY: install-base
install-base: .venv/base ## client, server, aws, gcp and Ray's dashboard; no trainer
.PHONY: install-dev
install-dev: .venv/dev ## all of that, the trainer and the tools for tests
.PHONY: install-policy
install-policy: infra/policy/.venv/ready ## what `pulumi preview --policy-pack` runs the rules with

# `requirements/gpu.txt` is for images of GPU nodes.
.venv/%: requirements/%.txt pyproject.toml .ci/setup
	@bash .ci/setup $*

# pulumi-policy does not fit into .venv.
infra/policy/.venv/ready: infra/policy/requirements.txt .ci/setup
	@bash .ci/setup policy

# Nor does verifiers.
.PHONY: install-verifiers
install-verifiers: .venv-verifiers/ready ## what the environment `verifiers` plays tasksets with
.venv-verifiers/ready: requirements/verifiers.txt .ci/setup
	@bash .ci/setup verifiers

.PHONY: image
image: ## a container image with Ray, vLLM and the lock: images/
	@fabric="$(or $(strip $(FABRIC)),base)"
	if [ ! -f "images/$$fabric.Dockerfile" ]; then echo "FABRIC=$$fabric has no image (allowed: base, efa, gib)" >&2; exit 2; fi
	docker build --file "images/$$fabric.Dockerfile" --tag "$(or $(strip $(IMAGE)),flotilla-$$fabric:1)" requirements

# Tests

# Three files at a time on two cores, as most tests wait for processes to start.
.PHONY: test
test: .venv/dev ## all but slow tests, those of test-wide and test-hosts
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=25 -m "not slow and not wide and not hosts"

# Where they are: to import all other tests takes each of three processes a minute. A test holds that none is elsewhere.
WIDE := tests/integration tests/unit/trainer/ranks/test_worker.py
HOSTS := tests/integration tests/contract/dstack

# What a unit test and one run of its kind in `make test` hold already, over a cluster's or a run's life.
.PHONY: test-wide
test-wide: .venv/dev ## local clusters, engines, deadlines through their lives
	@$(BIN)/pytest -n 3 --dist loadfile --durations=25 -m "wide and not slow and not hosts" $(WIDE)

# Real dstack servers and Slurms, with hosts in namespaces: root alone can make those. Labs of several workers do not meet.
.PHONY: test-hosts
test-hosts: .venv/dev ## dstack, Slurm tests; root installs Docker, sshd, Slurm
	@bash .ci/setup hosts
	$(BIN)/pytest -n 3 --dist loadfile --durations=60 -m "hosts and not slow" $(HOSTS)

# Where requirements/gpu.txt is installed, such as in an image, with pytest and pytest-timeout; elsewhere they are skipped.
# A process for each file: vLLM has one engine per process that can sleep.
.PHONY: test-gpu
test-gpu: ## tests that need a GPU, in an environment that uses it
	@for file in tests/gpu/test_*.py; do $(or $(wildcard $(BIN)/python),python3) -m pytest -m gpu -rs "$$file"; done

.PHONY: test-all
test-all: .venv/dev ## all tests; root installs what make test-hosts does
	@bash .ci/setup hosts
	$(BIN)/pytest

# Each break costs the seconds that its tests take to start; JOBS at a time.
.PHONY: breaks
breaks: .venv/dev ## break code one place at a time: tests must fail
	@$(BIN)/python -m lab.breaks --jobs $(or $(strip $(JOBS)),2)

.PHONY: check
check: .venv/dev ## formatting, lint, types, language of the pages
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright # 4 GB, node's own limit, are just not enough: it checks the same again and again
	$(BIN)/python -m lab.prose

.PHONY: bench
bench: .venv/dev ## ratios against peers, with the limits they are held to
	@$(BIN)/python -m benchmarks

# Exact, hashed and free of download addresses, so that any mirror serves. One resolution for Linux and macOS, Python 3.11 to 3.13.
.PHONY: lock
lock: .venv/dev ## compile requirements/*.txt from pyproject.toml again
	@PATH=$$PATH:$$PWD/.venv-uv/bin
	export UV_CUSTOM_COMPILE_COMMAND="make lock"
	lock="uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --python-version 3.11"
	all="--extra client --extra server --extra aws --extra gcp --extra cluster"
	rm -f requirements/*.txt infra/policy/requirements.txt
	$$lock pyproject.toml $$all --extra clouds --extra cpu --group dev --overrides requirements/cpu-overrides.in -o requirements/dev.txt
	$$lock pyproject.toml $$all -c requirements/dev.txt -o requirements/base.txt
	for extra in client server aws gcp clouds cpu; do $$lock pyproject.toml --extra $$extra --overrides requirements/cpu-overrides.in -c requirements/dev.txt -o requirements/$$extra.txt; done
	$$lock pyproject.toml --extra gpu -o requirements/gpu.txt
	$$lock --group policy -o infra/policy/requirements.txt
	$$lock --group verifiers -o requirements/verifiers.txt

.PHONY: clean
clean: ## stop what runs from this folder, remove build/ and .venv
	@if [ -x $(BIN)/python ] && [ -f build/local/cluster.json ]; then $(BIN)/python -m cluster_tasks.local down; fi
	if [ -x $(BIN)/python ] && [ -f build/server/server.json ]; then $(BIN)/python -m fleets.server down; fi # refuses while it has machines
	rm -rf build .venv .venv-verifiers infra/policy/.venv .pytest_cache .ruff_cache
