# Targets for people; the work is in scripts/. Variables: PYTHON (interpreter for .venv), ARGS (flags for serve or pytest).
PYTHON ?= python3
ARGS ?=
export PYTHON

.PHONY: help setup serve test test-fuzz test-clients test-kl test-aarch64 test-sanitized check clean

help:
	@echo "make serve   install into .venv and start the server with the built-in model (ARGS='...' adds flags)"
	@echo "make test    install the test requirements and run every test (ARGS='tests/unit' narrows it)"
	@echo "make test-fuzz     fuzz every route with bodies made from /openapi.json (ARGS goes to pytest)"
	@echo "make test-clients  run the lm-eval harness against a server, in an environment of its own"
	@echo "make test-kl       compare quantised weights of every type with float32 over 1,000 tokens (ARGS goes to pytest)"
	@echo "make test-aarch64    run all kernel tests on the AArch64 libraries, emulated (a tenth of them runs in make test)"
	@echo "make test-sanitized  run the kernel tests with address and undefined-behaviour sanitizers"
	@echo "make check   formatting, lint, types, generated docs"
	@echo "make clean   remove .venv and build results"

setup:
	@scripts/setup

serve: setup
	@exec .venv/bin/serve $(ARGS)

test:
	@scripts/test $(ARGS)

test-fuzz:
	@scripts/test-fuzz $(ARGS)

test-clients:
	@scripts/test-clients $(ARGS)

test-kl:
	@scripts/test-kl $(ARGS)

test-aarch64:
	@scripts/system-packages
	@SERVE_TEST_EMULATED=all scripts/test tests/kernels -k aarch64 $(ARGS)

test-sanitized:
	@scripts/test-sanitized $(ARGS)

check:
	@scripts/check

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis serve/kernels/cpu/*.so
