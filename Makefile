# Every target sets up what it needs in .venv, and again only when pyproject.toml or constraints.txt change.
#
#   make demo      train, calibrate, attack on digits: a table and an HTML report (about a minute)
#   make explore   the explorer on digits, in your browser
#   make quick     the mathematics and the pipeline: no server, no subprocess (under a minute on two cores)
#   make test      the tests (a few minutes on two cores)
#   make bench-test the benchmark scripts on small sizes (half a minute)
#   make load-test the HTTP service under load: rows in out/load/ (about two minutes)
#   make ray-test  the HTTP service and the smoothing engine on a local Ray cluster (installs Ray)
#   make bench     speed and memory on this CPU beside what they are compared with: results/benchmarks/ (some minutes);
#                  BENCH="engine ptt --quick" passes names and options; bench-gpu measures networks on a GPU
#   make site      the documentation as a folder of pages, out/site, that opens without a server
#   make hugging-face-test  the Hugging Face adapter, its guide and its example (installs transformers)
#   make mlflow-test   the MLflow flavour against MLflow: log, load, serve (installs mlflow-skinny)
#   make wheel-test    the wheel and the sdist in clean environments of Python 3.11 to 3.13, where those can be had
#   make browser-test  the pages in Chromium (installs Playwright; Chromium comes from the system)
#
# PyPI's torch for Linux brings several gigabytes of CUDA. For the CPU build, point pip at its index:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
OUT ?= demo
BENCH ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo explore quick test bench-test load-test ray-test hugging-face-test mlflow-test wheel-test browser-test lint types docs docs-check site bench bench-gpu clean

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; sys.exit("keepcover needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(INSTALL) --editable '.[$*]'
	@touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/keepcover demo --out $(OUT)

explore: $(VENV)/.ready-explore
	$(BIN)/keepcover explore

QUICK := noise scores bounds promises tasks methods prediction/test_outputs.py
SLOW := methods/test_audit_law.py tasks/test_several.py

quick: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(addprefix tests/,$(QUICK)) $(addprefix --ignore tests/,$(SLOW))

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n auto --dist worksteal

bench-test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n auto -m bench tests/benchmarks

load-test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -m load tests/serve

ray-test: $(VENV)/.ready-test $(VENV)/.ready-serve-ray
	$(BIN)/python -m pytest -q -m ray tests

hugging-face-test: $(VENV)/.ready-test $(VENV)/.ready-hugging-face
	$(BIN)/python -m pytest -q -k "hugging_face or hugging-face" tests

mlflow-test: $(VENV)/.ready-mlflow-test
	$(BIN)/python -m pytest -q -k mlflow tests

wheel-test: $(VENV)/.ready-wheel
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m pytest -q -m wheel tests/test_wheel.py

browser-test: $(VENV)/.ready-browser
	$(BIN)/python -m pytest -q -m browser tests

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-test $(VENV)/.ready-lint
	$(BIN)/pyright

docs: $(VENV)/.ready-docs
	$(BIN)/python docs/generate.py

# --strict: a warning, a dead link or a dead anchor fails the build (never with --quiet, which hides warnings from --strict too). The
# variable silences an advertisement.
site: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir out/site

docs-check: $(VENV)/.ready-docs
	$(BIN)/python docs/generate.py --check
	$(MAKE) --no-print-directory site

bench: $(VENV)/.ready-bench
	$(BIN)/python benchmarks/run.py $(BENCH)

# On a machine whose Python has torch with CUDA, numpy, scipy, safetensors and jaxtyping; nothing is installed.
bench-gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/run.py --device cuda --compile $(BENCH)

clean:
	rm -rf $(VENV) build dist out demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
