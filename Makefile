# Every command sets up what it needs (system packages, virtual environment, build) and reuses it the
# next time. Long steps print one line; their output is in build/logs/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
PYTHON ?= python3
# AUTO compiles the CUDA parts when nvcc is found; ON insists, OFF leaves them out.
CUDA ?= AUTO

VENV := .venv
VENV_PYTHON := $(CURDIR)/$(VENV)/bin/python
STAMPS := build/stamps
LOGS := build/logs
STEP := scripts/step
export PYTHON
# Compilations are the same whatever build folder they run in: the wheel's finds the release build's.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# What ccache asks for to cache code that uses precompiled headers.
export CCACHE_SLOPPINESS := pch_defines,time_macros
# What a compilation read comes from the compiler's list, not from preprocessing it a second time.
export CCACHE_DEPEND := 1

# Looked up when a recipe runs, after the system packages. The wheel then gets its objects from the build's.
LAUNCHER = $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
RELEASE_OPTIONS = $(LAUNCHER) -DMOEGEMM_CUDA=$(CUDA) -DMOEGEMM_BUILD_TORCH=ON -DPython3_EXECUTABLE=$(VENV_PYTHON)
WHEEL_OPTIONS = $(patsubst -D%,--config-settings=cmake.define.%,$(LAUNCHER) -DMOEGEMM_CUDA=$(CUDA))
SANITIZER_OPTIONS = $(LAUNCHER) -DMOEGEMM_BUILD_CLI=OFF
# clang-tidy reads file by file, and no precompiled headers of another compiler.
LINT_OPTIONS = $(RELEASE_OPTIONS) -DCMAKE_UNITY_BUILD=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON

.PHONY: help
help: ## List the commands
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: CUDA=AUTO|ON|OFF, JOBS=$(JOBS), PYTHON=$(PYTHON)"

.PHONY: demo
demo: build ## Build, then run and check one MoE layer on this machine
	@echo
	@build/release/src/cli/moegemm run demo
	@echo
	@PYTHONPATH=python $(VENV_PYTHON) examples/train_moe.py --quick --plot build/train_moe.png

.PHONY: test
test: ## Build, then run every test that this machine can run
	@STEP_IN_PARALLEL=1 $(MAKE) -j 2 $(STAMPS)/venv build-sanitizers  # one waits for the network, one for the compiler
	@$(MAKE) build
	@scripts/run_tests

.PHONY: test-gpu
test-gpu: ## Run every test that can use the GPU, and say so when there is none
	@scripts/run_gpu_tests

.PHONY: sanitize-gpu
sanitize-gpu: ## Check the GPU kernels' memory accesses and races with compute-sanitizer
	@scripts/run_gpu_sanitizers

.PHONY: bench
bench: build ## Compare with torch on the CPU, and on the GPU when there is one; writes build/bench/
	@scripts/run_benchmarks

.PHONY: record
record: build ## Bring the records of build/bench/ into docs/benchmarks/
	@scripts/record_benchmarks

.PHONY: lint
lint: $(STAMPS)/lint-tools ## Check formatting and run the static analysers
	@$(STEP) "Configure (lint)" $(LOGS)/configure-lint.log cmake --preset release -B build/lint $(LINT_OPTIONS)
	@scripts/lint

.PHONY: docs
docs: $(STAMPS)/docs-tools ## Build the documentation as a site into build/site/; a broken link fails
	@$(STEP) "Build the site" $(LOGS)/docs.log env NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict
	@echo "build/site/index.html"

.PHONY: wheel
wheel: $(STAMPS)/venv ## Build the Python wheel into dist/
	@$(STEP) "Build the wheel" $(LOGS)/wheel.log $(VENV_PYTHON) -m pip wheel --no-deps --no-build-isolation $(WHEEL_OPTIONS) --wheel-dir dist .
	@ls -1 dist/*.whl

.PHONY: build
build: build/release/build.ninja ## Set up and compile, release
	@$(STEP) "Compile (release)" $(LOGS)/compile-release.log cmake --build build/release -j $(JOBS)
	@scripts/link_programs $(VENV)

# Races need threads: of the tsan build only the conformance suite and the pool's test are run and built.
.PHONY: build-sanitizers
build-sanitizers: build/asan/build.ninja build/tsan/build.ninja
	@$(STEP) "Compile (asan)" $(LOGS)/compile-asan.log cmake --build build/asan -j $(JOBS)
	@$(STEP) "Compile (tsan)" $(LOGS)/compile-tsan.log cmake --build build/tsan -j $(JOBS) -t moegemm_conformance cpu_executor_test

.PHONY: clean
clean: ## Remove the builds and the virtual environment
	rm -rf build $(VENV) dist

$(STAMPS)/system: requirements/system.txt scripts/install_system_packages
	@$(STEP) "System packages" $(LOGS)/system-packages.log scripts/install_system_packages $<
	@mkdir -p $(@D) && touch $@

$(STAMPS)/venv: requirements/torch.txt requirements/dev.txt scripts/make_venv | $(STAMPS)/system
	@$(STEP) "Virtual environment" $(LOGS)/venv.log scripts/make_venv $(VENV)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/lint-tools: requirements/lint.txt requirements/system-lint.txt $(STAMPS)/venv
	@$(STEP) "Lint: system packages" $(LOGS)/lint-packages.log scripts/install_system_packages requirements/system-lint.txt
	@$(STEP) "Lint: Python packages" $(LOGS)/lint-venv.log $(VENV_PYTHON) -m pip install --ignore-installed -r requirements/lint.txt
	@touch $@

$(STAMPS)/docs-tools: requirements/docs.txt $(STAMPS)/venv
	@$(STEP) "Documentation: Python packages" $(LOGS)/docs-venv.log $(VENV_PYTHON) -m pip install -r requirements/docs.txt
	@touch $@

# Reconfigured when the options change; CMake itself follows changes to its own files.
$(STAMPS)/options-release: force | $(STAMPS)/system
	@scripts/remember $@ "$(RELEASE_OPTIONS)"
$(STAMPS)/options-sanitizers: force | $(STAMPS)/system
	@scripts/remember $@ "$(SANITIZER_OPTIONS)"
.PHONY: force
force:

build/release/build.ninja: CMakePresets.json $(STAMPS)/system $(STAMPS)/venv $(STAMPS)/options-release
	@$(STEP) "Configure (release)" $(LOGS)/configure-release.log cmake --preset release $(RELEASE_OPTIONS)
	@touch $@

build/asan/build.ninja build/tsan/build.ninja: build/%/build.ninja: CMakePresets.json $(STAMPS)/system $(STAMPS)/options-sanitizers
	@$(STEP) "Configure ($*)" $(LOGS)/configure-$*.log cmake --preset $* $(SANITIZER_OPTIONS)
	@touch $@
