# Every target sets up what it needs in .venv, and again only when pyproject.toml or constraints.txt change.
#
#   make demo      train, calibrate, attack on digits: a table and an HTML report (about a minute)
#   make explore   the explorer on digits, in your browser
#   make test      the tests (a few minutes on two cores)
#   make load-test the HTTP service under load: rows in out/load/ (about two minutes)
#   make ray-test  the HTTP service and the smoothing engine on a local Ray cluster (installs Ray)
#   make browser-test  the pages in Chromium (installs Playwright; Chromium comes from the system)
#
# PyPI's torch for Linux brings several gigabytes of CUDA. For the CPU build, point pip at its index:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
OUT ?= demo

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo explore test load-test ray-test browser-test lint types docs docs-check bench clean

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(INSTALL) --editable '.[$*]'
	@touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/holdfast demo --out $(OUT)

explore: $(VENV)/.ready-explore
	$(BIN)/holdfast explore

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n auto

load-test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -m load tests/test_serve_load.py

ray-test: $(VENV)/.ready-test $(VENV)/.ready-serve-ray
	$(BIN)/python -m pytest -q -m ray tests

browser-test: $(VENV)/.ready-browser
	$(BIN)/python -m pytest -q -m browser tests

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-test $(VENV)/.ready-lint
	$(BIN)/pyright

docs: $(VENV)/.ready-demo
	$(BIN)/python docs/generate.py

docs-check: $(VENV)/.ready-demo
	$(BIN)/python docs/generate.py --check

bench: $(VENV)/.ready-demo
	$(BIN)/python benchmarks/attack.py --depth 20 --images 8 --draws 8 --steps 10 --out out/benchmarks/attack.json

clean:
	rm -rf $(VENV) build dist out demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
