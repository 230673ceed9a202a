# A short door to CMake and pip: each goal installs what it needs first, then builds only what it uses.
# Paths are relative, so that the checkout may lie under a folder with spaces.
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 20
VENV_PYTHON := build/venv/bin/python
# WERROR=1 turns warnings in our code into errors, as CI does.
CONFIGURE_FLAGS := $(if $(WERROR),-DNARROWS_WARNINGS_AS_ERRORS=ON)

.PHONY: help demo test test-cpp test-python sanitize asan tsan neon mutations fuzz bench microbench format format-check \
    clean cli nvrtc-12 kernels

help:
	@echo "make demo          build the command and run it on the example of a real model"
	@echo "make test          build and run all tests: C++, then Python in build/venv"
	@echo "make sanitize      the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer (clang)"
	@echo "make tsan          the C++ tests in which threads meet, under ThreadSanitizer"
	@echo "make neon          cross-compile for AArch64 and run tests of its instruction set under qemu"
	@echo "make mutations     put known defects into the library, one at a time, and expect its tests to fail"
	@echo "make kernels       compile the planned GPU kernels without a GPU and check their registers; needs NVRTC 13"
	@echo "make fuzz          replay the fuzzing corpus, then search FUZZ_SECONDS=20 for each target (clang)"
	@echo "make bench         measure and print the table of benchmarks"
	@echo "make microbench    measure each tile operation of each instruction set"
	@echo "make format        format the C++ files; make format-check only examines them"
	@echo "make clean         remove build/"
	@echo
	@echo "JOBS=N limits the parallel jobs. Missing packages are installed where root or sudo is at hand."

demo: cli
	@scripts/demo build/release/narrows

bench: cli
	build/release/narrows bench

microbench:
	@scripts/install-dependencies microbench
	cmake --preset release -DNARROWS_BUILD_BENCHMARKS=ON
	cmake --build --preset release --target narrows_microbench -j $(JOBS)
	build/release/narrows_microbench

cli:
	@scripts/install-dependencies build
	@test -f build/release/CMakeCache.txt || cmake --preset release -DNARROWS_BUILD_TESTS=OFF
	@cmake --build --preset release --target narrows_cli -j $(JOBS)

test: test-cpp test-python

test-cpp:
	@scripts/install-dependencies test
	cmake --preset release -DNARROWS_BUILD_TESTS=ON $(CONFIGURE_FLAGS)
	cmake --build --preset release -j $(JOBS)
	@mkdir -p build/results
	ctest --preset release -j $(JOBS) --output-junit "$(CURDIR)/build/results/ctest.xml"

test-python: build/venv/package.stamp
	@mkdir -p build/results
	$(VENV_PYTHON) -m pytest tests/python --junitxml build/results/pytest.xml

nvrtc-12:
	scripts/fetch-nvrtc build/nvrtc-12

# Everything is compiled anew: what compiling takes is checked too.
kernels: cli nvrtc-12
	@mkdir -p build/results
	scripts/compile-kernels build/release/narrows --nvrtc-12 build/nvrtc-12 --jobs $(JOBS) --report build/results/kernels.xml

build/venv/requirements.stamp: python/requirements-test.txt
	@scripts/install-dependencies test
	test -x $(VENV_PYTHON) || python3 -m venv build/venv
	$(VENV_PYTHON) -m pip install --quiet --requirement python/requirements-test.txt
	@touch $@

# The requirements hold the build's own tools, so no build environment is fetched and a second run works offline.
build/venv/package.stamp: build/venv/requirements.stamp pyproject.toml CMakeLists.txt \
    $(shell find cmake include src python -type f -not -name '*.pyc' 2>/dev/null)
	$(VENV_PYTHON) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=build-dir=build/python --config-settings=cmake.define.NARROWS_UNITY_BUILD=ON \
	  $(if $(WERROR),--config-settings=cmake.define.NARROWS_WARNINGS_AS_ERRORS=ON) .
	@touch $@

asan:
	@scripts/install-dependencies sanitize
	cmake --preset asan -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang -DNARROWS_BUILD_FUZZ=ON $(CONFIGURE_FLAGS)

sanitize: asan
	cmake --build --preset asan -j $(JOBS)
	@mkdir -p build/results
	NARROWS_TEST_SMALL=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  ctest --preset asan -j $(JOBS) --output-junit "$(CURDIR)/build/results/sanitize.xml"

# Only the tests in which threads meet: compiling all of them costs minutes.
tsan:
	@scripts/install-dependencies test
	cmake --preset tsan -DNARROWS_BUILD_TOOLS=OFF $(CONFIGURE_FLAGS)
	cmake --build --preset tsan --target narrows_thread_tests -j $(JOBS)
	@mkdir -p build/results
	NARROWS_TEST_SMALL=1 scripts/shards build/results/tsan $(JOBS) $(JOBS) build/tsan/narrows_thread_tests --gtest_brief=1

# Every test of the kernels, and one row in sixteen of the table of cases: emulation is slow.
EMULATED = qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/narrows_emulated_tests --gtest_brief=1
neon:
	@scripts/install-dependencies neon
	cmake --preset aarch64 -DNARROWS_BUILD_TESTS=ON $(CONFIGURE_FLAGS)
	cmake --build --preset aarch64 --target narrows_emulated_tests -j $(JOBS)
	@mkdir -p build/results
	NARROWS_TEST_SMALL=1 scripts/shards build/results/neon $(JOBS) $(JOBS) $(EMULATED) --gtest_filter=-table/*
	NARROWS_TEST_SMALL=1 scripts/shards build/results/neon-cases $(JOBS) $$(( 16 * $(JOBS) )) $(EMULATED) --gtest_filter=table/*

mutations:
	@scripts/install-dependencies test
	cmake --preset release -B build/mutations -DNARROWS_UNITY_BUILD=OFF $(CONFIGURE_FLAGS)
	cmake --build build/mutations --target narrows_tests -j $(JOBS)
	python3 -B tests/mutations/run.py . build/mutations --jobs $(JOBS)

fuzz: asan
	cmake --build --preset asan --target narrows_fuzzers -j $(JOBS)
	scripts/fuzz build/asan $(FUZZ_SECONDS) $(JOBS)

format:
	@scripts/install-dependencies format
	scripts/format

format-check:
	@scripts/install-dependencies format
	scripts/format --check

clean:
	rm -rf build
