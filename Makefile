# Commands on a fresh machine: `make demo`, `make test`, `make test-vllm`. Each sets up all that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
DEBIAN_PACKAGES := libibverbs1 librdmacm1 libnuma1
# The torch that is tested. Where pip has no CPU build of it to offer, it is the CUDA one, of several gigabytes.
TORCH ?= torch==2.13.0

# What a virtual environment $(1) needs of Debian.
define install_debian_packages
	@missing=""; for package in $(DEBIAN_PACKAGES); do \
	  dpkg-query -W -f='$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; done; \
	test -x $(1)/bin/python || $(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then echo "installing Debian packages:$$missing"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing; fi
endef

.PHONY: help setup demo test test-vllm soak simulate lint format clean

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## make the virtual environment and install everything into it

$(VENV)/.installed: pyproject.toml Makefile
	$(call install_debian_packages,$(VENV))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[cpu,demo,dev]'
	@touch $@

demo: setup  ## photographs through a vision tower: encoders publish, prefill processes read
	$(BIN)/mmcache demo $(DEMO_ARGUMENTS)

test: setup  ## all tests, on real processes
	$(BIN)/python -m pytest $(TEST_ARGUMENTS)

test-vllm: $(VLLM_VENV)/.installed  ## the connector in a real vLLM on the CPU, in an environment of its own
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(TEST_ARGUMENTS)

$(VLLM_VENV)/.installed: pyproject.toml Makefile tests/vllm/install.sh
	$(call install_debian_packages,$(VLLM_VENV))
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	tests/vllm/install.sh $(VLLM_VENV)
	@touch $@

soak: setup  ## an hour of mixed load with random faults, after which nothing may have leaked
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGUMENTS)

simulate: setup  ## schedules of a simulated world, from one seed after another, until one breaks a promise
	$(BIN)/python -m tests.simulation --jobs 2 $(SIMULATE_ARGUMENTS)

lint: setup  ## format, lint, types for every supported Python, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	for version in 3.10 3.12 3.13; do $(BIN)/mypy --python-version $$version || exit 1; done
	$(BIN)/lint-imports

format: setup  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the other commands made
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
