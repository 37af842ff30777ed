# Every target sets up what it needs: each may be the first thing typed in a fresh clone.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo check test test-slow deploy-test deploy-files bench bench-full proto proto-release clean setup-demo lint sanitizers

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHON ?= python3

CORE_SOURCES = $(wildcard sidecar/core/*.cc sidecar/core/*.h)
PROTOS = $(wildcard proto/agentspec/draft/v1/*.proto)
# Decides whether protobuf runtimes as old as 5.29 can load the generated code.
PROTO_TOOLS = grpcio-tools==1.71.2 buf-bin==1.75.0
PROTO_PYTHON = build/proto/bin/python

help: ## print this list
	@echo "Targets (PYTHON=<path> chooses the interpreter, now $(PYTHON)):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or repair .venv: vLLM, all extras, the compiled core
	@.ci/setup dev

setup-demo:
	@.ci/setup demo

demo: setup-demo ## serve a small model to 16 agents: plain, ngram and AgentSpec side by side (DEMO_MODEL=<hub id or folder>, MODE=hybrid|sidecar, REDIS=1)
	@python -m agentspec.benchmarks.demo

check: setup lint ## lint, types, tests without vLLM; under a minute
	python -m pytest -m "not vllm and not slow and not gpu and not deploy"

lint:
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run --Werror $(CORE_SOURCES)

# One thread: the engine's own threads would spin against the servers and clients that share the machine.
test test-slow: export OMP_NUM_THREADS ?= 1
test test-slow: export NUMBA_NUM_THREADS ?= 1
test test-slow: export VLLM_CPU_KVCACHE_SPACE ?= 1
test test-slow: export HF_HUB_OFFLINE ?= 1
test test-slow: export VLLM_NO_USAGE_STATS ?= 1
test test-slow: export DO_NOT_TRACK ?= 1

test: setup ## all tests but the slow ones and those that need a GPU
	python -m pytest -m "not slow and not gpu and not deploy"

test-slow: setup sanitizers ## soaks, long fuzzing, the core under ASan, UBSan and TSan
	python -m pytest -m "slow and not gpu" || [ $$? -eq 5 ]

sanitizers:
	for build in asan:address,undefined tsan:thread; do \
	  cmake -S sidecar/core -B build/$${build%:*} -G Ninja -DAGENTSPEC_TESTS=ON -DAGENTSPEC_SANITIZE=$${build#*:}; \
	  cmake --build build/$${build%:*} --target core_test; \
	  build/$${build%:*}/core_test; \
	done

bench: setup ## vLLM with AgentSpec, suffix decoding and neither on the bundled sample, in lockstep; ten minutes, resumable
	@mkdir -p build/bench
	agentspec-bench serve --batch-size 1 --batch-size 32 --method suffix --method agentspec --json build/bench/serve.json
	agentspec-bench report build/bench/serve.json -o build/bench/report.html

bench-full: setup ## every method on recorded runs (WARM=..., EVAL=...: traces); hours, resumable
	@mkdir -p build/bench
	agentspec-bench serve $(addprefix --warm ,$(WARM)) $(addprefix --eval ,$(EVAL)) $(addprefix --workload ,$(WORKLOADS)) --batch-size 1 --batch-size 8 \
	  --batch-size 32 --batch-size 64 --method ngram --method suffix --method agentspec --method agentspec:off --json build/bench/full.json
	agentspec-bench report build/bench/full.json -o build/bench/full.html

# The tools live apart: their protobuf is the oldest that we support, and vLLM wants a newer one.
build/proto/tools: Makefile
	python -m venv --clear --without-pip build/proto
	python -m pip --python $(PROTO_PYTHON) install --quiet --disable-pip-version-check $(PROTO_TOOLS)
	@touch $@

proto: setup build/proto/tools ## generate the protobuf code that is committed, and lint the contract
	build/proto/bin/buf lint proto
	$(PROTO_PYTHON) -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

build/deploy/tools: .ci/deploy-tools .ci/debian
	.ci/deploy-tools
	@touch $@

deploy-test: setup build/deploy/tools ## chart, manifests, images, alerts: render, validate, check against the code
	python -m pytest -m deploy

deploy-files: setup build/deploy/tools ## write what is made from the chart: its table of values, the Kustomize base
	python -m tests.deploy_files

proto-release: build/proto/tools ## keep the contract of a release, which later ones must not break
	build/proto/bin/buf build proto --exclude-source-info -o proto/released.binpb

clean: ## remove what was built; .venv keeps the packages
	rm -rf build .mypy_cache .ruff_cache .hypothesis .venv/setup-* .venv/bin/redis-server
