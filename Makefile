# make demo    a model learns on this machine, start to end     make test    all tests but slow ones and those of make test-hosts
# make bench   ratios against peers                             make check   formatting, lint, types
# make install-base   what a laptop needs to drive a cluster elsewhere
# make install-policy   what Pulumi runs the policy pack with
.ONESHELL:
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
unexport PYTHONDONTWRITEBYTECODE
export UV_PYTHON_PREFERENCE ?= system

BIN := .venv/bin

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

# What a laptop needs to drive a cluster elsewhere: pulumi, dstack, `ray job submit`. Also on macOS.
install-base: .venv/base
.venv/base: requirements/base.txt pyproject.toml .ci/setup
	@bash .ci/setup base

# What the trainer needs on a machine without GPUs; `requirements/gpu.txt` is for images of GPU nodes.
install: .venv/cpu
.venv/cpu: requirements/cpu.txt pyproject.toml .ci/setup
	@bash .ci/setup cpu

install-dev: .venv/dev
.venv/dev: requirements/dev.txt pyproject.toml .ci/setup
	@bash .ci/setup dev

# What `pulumi preview --policy-pack infra/policy` runs the rules with; pulumi-policy does not fit into .venv.
install-policy: infra/policy/.venv/ready
infra/policy/.venv/ready: infra/policy/requirements.txt .ci/setup
	@bash .ci/setup policy

demo: .venv/cpu
	@$(BIN)/python -m cluster_tasks.local.demo $(if $(KEEP),--keep) $(if $(KILL),--kill)

# Two files at a time, as most tests wait for processes to start; more would want more than 8 GB of memory.
test: .venv/dev
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not hosts"

# A real dstack server and a real Slurm, with hosts in namespaces: root alone can make those.
test-hosts: .venv/dev
	@$(BIN)/pytest -m "hosts and not slow"

test-all: .venv/dev
	@$(BIN)/pytest

check: .venv/dev
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/dev
	@$(BIN)/python -m benchmarks

# Exact, hashed and free of download addresses, so that any mirror serves.
lock: .venv/dev
	@export UV_CUSTOM_COMPILE_COMMAND="make lock"
	lock="uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --python-version 3.11"
	rm -f requirements/*.txt infra/policy/requirements.txt
	$$lock pyproject.toml --extra cpu --group dev -o requirements/dev.txt
	$$lock pyproject.toml --extra cpu -c requirements/dev.txt -o requirements/cpu.txt
	$$lock pyproject.toml -c requirements/dev.txt -o requirements/base.txt
	$$lock pyproject.toml --extra gpu -o requirements/gpu.txt
	$$lock --group policy -o infra/policy/requirements.txt

clean:
	@if [ -x $(BIN)/python ] && [ -f build/local/cluster.json ]; then $(BIN)/python -m cluster_tasks.local down; fi
	if [ -x $(BIN)/python ] && [ -f build/server/server.json ]; then $(BIN)/python -m fleets.server down; fi # refuses while it has machines
	rm -rf build .venv infra/policy/.venv .pytest_cache .ruff_cache

.PHONY: help install install-base install-dev install-policy demo test test-hosts test-all check bench lock clean
