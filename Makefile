# Every command sets up what it needs (system packages, virtual environment, build) and reuses it the
# next time. Long steps print one line, which on a terminal shows where they are; their output is in build/logs/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
PYTHON ?= python3
# Empty or AUTO: `make demo` compiles CUDA kernels for the GPUs that are here, all others every kernel if nvcc is found. ON
# insists, OFF leaves them out. CUDA_ARCHS names compute capabilities, for instance "80;90", and insists too.
CUDA ?=
CUDA_ARCHS ?=

VENV := .venv
VENV_PYTHON := $(CURDIR)/$(VENV)/bin/python
PIP := scripts/pip_install $(VENV_PYTHON)
STAMPS := build/stamps
LOGS := build/logs
STEP := scripts/step
# Of two branches that run at the same time the other shows its progress.
VENV_STEP := $(if $(STEP_IN_PARALLEL),STEP_QUIET=1) $(STEP)
export PYTHON
# Compilations are the same whatever build folder they run in: the wheel's finds the release build's.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# What ccache asks for to cache code that uses precompiled headers.
export CCACHE_SLOPPINESS := pch_defines,time_macros
# What a compilation read comes from the compiler's list, not from preprocessing it a second time.
export CCACHE_DEPEND := 1
# Objects and plots need no home: where it cannot be written to, caches are in the build folder.
ifneq ($(shell test -w "$${HOME:-/nonexistent}" || echo no),)
export CCACHE_DIR ?= $(CURDIR)/build/ccache
export MPLCONFIGDIR ?= $(CURDIR)/build/matplotlib
export PIP_NO_CACHE_DIR ?= 1
endif

# Looked up when a recipe runs, after the system packages. The wheel then gets its objects from the build's.
LAUNCHER = $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
# Of all goals only a lone demo does without the rest.
PURPOSE := $(if $(filter demo build-demo,$(MAKECMDGOALS)),$(if $(filter-out demo build-demo,$(MAKECMDGOALS)),all,demo),all)
PURPOSE_OPTIONS = $(shell scripts/release_options $(PURPOSE) "$(CUDA)" "$(CUDA_ARCHS)")
BUILD := $(shell scripts/release_options $(PURPOSE) "$(CUDA)" "$(CUDA_ARCHS)" folder)
RELEASE_OPTIONS = $(LAUNCHER) $(PURPOSE_OPTIONS) -DMOEGEMM_BUILD_TORCH=ON -DPython3_EXECUTABLE=$(VENV_PYTHON)
# CUDA=OFF, or no nvcc that is new enough: the wheel without kernels.
WHEEL_VARIANT = $(if $(filter OFF,$(CUDA)),cpu,$(if $(filter ON,$(CUDA))$(CUDA_ARCHS)$(shell scripts/gpu/usable_nvcc),cuda,cpu))
SANITIZER_OPTIONS = $(LAUNCHER) -DMOEGEMM_BUILD_CLI=OFF
# clang-tidy reads file by file, and no precompiled headers of another compiler.
LINT_OPTIONS = $(RELEASE_OPTIONS) -DCMAKE_UNITY_BUILD=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON

.PHONY: help
help: ## List the commands
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: CUDA=AUTO|ON|OFF, CUDA_ARCHS=80;90, JOBS=$(JOBS), PYTHON=$(PYTHON)"

.PHONY: demo
demo: build-demo ## Build what it needs, then run a MoE layer beside torch on this machine and train a small model
	@echo
	@PYTHONPATH=python $(VENV_PYTHON) examples/demo.py --out build/demo

.PHONY: build-demo
build-demo: $(BUILD)/build.ninja
	@$(STEP) "Compile (demo)" $(LOGS)/compile-demo.log cmake --build $(BUILD) -j $(JOBS) -t moegemm_cli moegemm_torch
	@scripts/link_programs $(VENV) $(BUILD)

.PHONY: test
test: ## Build, then run every test that this machine can run
	@STEP_IN_PARALLEL=1 $(MAKE) -j 2 $(STAMPS)/venv-hub build-sanitizers  # one waits for the network, one for the compiler
	@$(MAKE) build build-arm
	@scripts/run_tests

.PHONY: test-gpu
test-gpu: ## Run every test that can use the GPU, and say so when there is none
	@scripts/gpu/run_tests

.PHONY: sanitize-gpu
sanitize-gpu: ## Check the GPU kernels' memory accesses and races with compute-sanitizer
	@scripts/gpu/run_sanitizers

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

DOCS_VENV := build/docs-venv
.PHONY: docs
docs: $(STAMPS)/docs-tools ## Build the documentation as a site into build/site/; a broken link fails
	@$(STEP) "Build the site" $(LOGS)/docs.log env NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "build/site/index.html"

.PHONY: wheel
wheel: $(STAMPS)/wheel-tools ## Build the Python wheel into dist/; with CUDA=OFF the one without kernels
	@CUDA_ARCHS="$(CUDA_ARCHS)" scripts/package/wheel $(WHEEL_VARIANT) $(LAUNCHER)

.PHONY: sdist
sdist: $(STAMPS)/wheel-tools ## Build the source package into dist/
	@scripts/package/sdist

.PHONY: hub
hub: $(STAMPS)/venv-demo ## Build a kernel for the Hugging Face Hub into dist/hub/
	@CUDA_ARCHS="$(CUDA_ARCHS)" $(VENV_PYTHON) scripts/package/hub_kernel.py $(WHEEL_VARIANT) $(LAUNCHER) -DPython3_EXECUTABLE=$(VENV_PYTHON)

.PHONY: package
package: $(STAMPS)/system ## Build the C++ tarball and Debian package into dist/
	@CUDA="$(CUDA)" CUDA_ARCHS="$(CUDA_ARCHS)" scripts/package/cpp $(LAUNCHER)

.PHONY: build
build: $(BUILD)/build.ninja ## Set up and compile, release
	@$(STEP) "Compile (release)" $(LOGS)/compile-release.log cmake --build $(BUILD) -j $(JOBS)
	@scripts/link_programs $(VENV) $(BUILD)

# Races need threads: of the tsan build only the conformance suite and the pool's test are run and built.
.PHONY: build-sanitizers
build-sanitizers: build/asan/build.ninja build/tsan/build.ninja
	@$(STEP) "Compile (asan)" $(LOGS)/compile-asan.log cmake --build build/asan -j $(JOBS)
	@$(STEP) "Compile (tsan)" $(LOGS)/compile-tsan.log cmake --build build/tsan -j $(JOBS) -t moegemm_conformance cpu_executor_test

# The portable kernels on another machine than x86-64, where its compiler and an emulator are or can be installed.
.PHONY: build-arm
build-arm: $(STAMPS)/system-arm
	@why=$$(scripts/arm_unavailable); if [ -n "$$why" ]; then echo "Tests on 64-bit Arm are left out: $$why"; exit 0; fi; \
	$(STEP) "Configure (aarch64)" $(LOGS)/configure-aarch64.log cmake --preset aarch64 $(filter-out -DCMAKE_CUDA%,$(LAUNCHER)) && \
	$(STEP) "Compile (aarch64)" $(LOGS)/compile-aarch64.log cmake --build --preset aarch64 -j $(JOBS)

.PHONY: clean
clean: ## Remove the builds and the virtual environment
	rm -rf build $(VENV) dist

$(STAMPS)/system: requirements/system.txt scripts/install_system_packages
	@$(STEP) "System packages" $(LOGS)/system-packages.log scripts/install_system_packages $<
	@mkdir -p $(@D) && touch $@

$(STAMPS)/system-test: requirements/system-test.txt scripts/install_system_packages | $(STAMPS)/system
	@$(STEP) "System packages for the tests" $(LOGS)/system-packages-test.log scripts/install_system_packages $<
	@touch $@

# Nothing fails without them.
$(STAMPS)/system-arm: requirements/system-arm.txt scripts/install_system_packages | $(STAMPS)/system-test
	@mkdir -p $(LOGS) && scripts/install_system_packages $< >$(LOGS)/system-packages-arm.log 2>&1 || true
	@touch $@

# Slim, for the demo; the rest is installed on top of it.
DEMO_LISTS := requirements/demo.txt $(if $(wildcard /dev/nvidiactl),requirements/demo-gpu.txt)
$(STAMPS)/venv-demo: requirements/torch.txt $(DEMO_LISTS) scripts/make_venv scripts/pip_install | $(STAMPS)/system
	@$(VENV_STEP) "Virtual environment" $(LOGS)/venv-demo.log scripts/make_venv $(VENV) $(DEMO_LISTS)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/venv: requirements/dev.txt $(STAMPS)/venv-demo
	@$(VENV_STEP) "Virtual environment for the tests" $(LOGS)/venv.log scripts/make_venv $(VENV) requirements/dev.txt
	@touch $@

# Nothing fails without it, and the next `make test` tries again.
$(STAMPS)/venv-hub: requirements/hub.txt scripts/pip_install | $(STAMPS)/venv
	@STEP_OPTIONAL="one test is skipped" $(VENV_STEP) "The library of the Hub, apart" $(LOGS)/venv-hub.log $(PIP) "the library of the Hub" --retries 1 --upgrade --target $(VENV)/hub -r $<
	@if [ -d $(VENV)/hub/kernels ]; then touch $@; fi

$(STAMPS)/lint-tools: requirements/lint.txt requirements/system-lint.txt $(STAMPS)/venv
	@$(STEP) "Lint: system packages" $(LOGS)/lint-packages.log scripts/install_system_packages requirements/system-lint.txt
	@$(STEP) "Lint: Python packages" $(LOGS)/lint-venv.log $(PIP) "the tools of lint" --ignore-installed -r requirements/lint.txt
	@touch $@

$(STAMPS)/wheel-tools: requirements/wheel.txt $(STAMPS)/venv-demo
	@$(STEP) "Tools for the wheel" $(LOGS)/wheel-tools.log $(PIP) "the tools for the wheel" -r $<
	@touch $@

# An environment of its own: pages are made from the sources alone, without torch.
$(STAMPS)/docs-tools: requirements/docs.txt | $(STAMPS)/system
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(STEP) "Tools for the site" $(LOGS)/docs-tools.log scripts/pip_install $(DOCS_VENV)/bin/python "the tools for the site" -r $<
	@touch $@

# Reconfigured when the options change; CMake itself follows changes to its own files.
$(STAMPS)/options-$(notdir $(BUILD)): force | $(STAMPS)/system
	@scripts/remember $@ "$(RELEASE_OPTIONS)"
$(STAMPS)/options-sanitizers: force | $(STAMPS)/system $(STAMPS)/system-test
	@scripts/remember $@ "$(SANITIZER_OPTIONS)"
.PHONY: force
force:

# A demo needs no test tools; whoever configures with tests needs them first.
release_needs_demo := $(STAMPS)/venv-demo
release_needs_all := $(STAMPS)/venv $(STAMPS)/system-test
$(BUILD)/build.ninja: CMakePresets.json $(STAMPS)/system $(release_needs_$(PURPOSE)) $(STAMPS)/options-$(notdir $(BUILD))
	@$(STEP) "Configure ($(notdir $(BUILD)))" $(LOGS)/configure-$(notdir $(BUILD)).log cmake --preset release -B $(BUILD) $(RELEASE_OPTIONS)
	@touch $@

build/tsan/build.ninja: | build/asan/build.ninja  # one line on the terminal
build/asan/build.ninja build/tsan/build.ninja: build/%/build.ninja: CMakePresets.json $(STAMPS)/system $(STAMPS)/options-sanitizers
	@$(STEP) "Configure ($*)" $(LOGS)/configure-$*.log cmake --preset $* $(SANITIZER_OPTIONS)
	@touch $@
