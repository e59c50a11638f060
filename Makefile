# Everything here sets itself up: `make demo` and `make test` need only Python 3.11+, pip and make.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c

# Say what is printed, not what is run.
.SILENT:
.PHONY: demo test thorough test-federated planted check lint types setup browser faults audit fuzz lock licences clean

setup: .venv/ready

# Versions are those that the tests last passed with. Where they are not to be had, others are taken, aloud.
LOCK ?= requirements-test.lock

.venv/ready: pyproject.toml $(LOCK)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "understudy needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	echo "setting up .venv (once, a minute or two)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check"
	$$pip -c $(LOCK) -e ".[dev]" || {
		echo "WARNING: the versions in $(LOCK) cannot all be had here: taking the newest that fit" >&2
		$$pip -e ".[dev]"
	}
	touch $@

# Write down the versions that are installed: without the addresses they came from, and without the
# name of a build (+cpu) that not every index has.
lock: setup
	{ echo "# Versions that the tests last passed with; written by: make lock"
	  $(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable \
	  | sed -E 's/ @ .*//; s/\+[A-Za-z0-9.]+$$//' | { grep == || true; }
	} > $(LOCK)
	touch .venv/ready

licences: setup
	$(BIN)/python tests/licences.py

# Look for files that break a reader, guided by coverage where atheris installs: docs/fuzzing.md.
MINUTES ?= 15
fuzz: setup
	$(BIN)/python -c 'import atheris' 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check atheris || echo "atheris does not install here: going on without coverage" >&2
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(READERS)

demo: setup
	run=runs/digits-eps10; n=1
	while [ -e "$$run" ] || [ -e "$$run.partial" ]; do n=$$((n + 1)); run=runs/digits-eps10-$$n; done
	$(BIN)/understudy generate digits --epsilon 10 --out "$$run" --ledger runs/ledger.sqlite
	$(BIN)/understudy evaluate "$$run"
	$(BIN)/understudy verify "$$run" --ledger
	$(BIN)/understudy report "$$run" --ledger
	$(BIN)/understudy report "$$run" --shareable
	echo "Open $$run/private/report.html; $$run-report.html is made from released files alone"

# The report page is tested in a browser. Without one, those tests are skipped and say so.
browser:
	find() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
	find > /dev/null && exit 0
	as_root=""; [ "$$(id -u)" = 0 ] || as_root="sudo -n"
	if command -v apt-get > /dev/null; then
		echo "installing Chromium for the tests of the report page (once)"
		{ $$as_root apt-get update && $$as_root apt-get install -y --no-install-recommends chromium; } > /dev/null 2>&1 || true
	fi
	find > /dev/null || printf '%s\n' "WARNING: there is no Chromium and it could not be installed:" "         the report page will NOT be tested in a browser. Install the package chromium to do so." >&2

# Types are checked while tests run: both take their time.
test: lint browser
	$(MAKE) --no-print-directory types & types=$$!
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder || { wait $$types; exit 1; }
	wait $$types

# Every moment of a full disk and of a loss of power; then two hundred kills, which takes a quarter of an hour.
faults: setup
	UNDERSTUDY_FAULTS=1 $(BIN)/python -m pytest tests/e2e/test_faults.py tests/unit/test_safekeeping.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kills.py

# What takes long: several processes, kills at random moments, each method from several sides.
thorough: setup
	$(BIN)/python -m pytest -m thorough -n 2 --dist loadfile

# Flower pins versions of what the rest needs too, so it has an environment of its own.
test-federated: .venv-federated/ready
	.venv-federated/bin/python -m pytest tests/federated
	.venv-federated/bin/python -m pytest tests/fuzz/test_readers_hold.py -k wire

.venv-federated/ready: pyproject.toml
	echo "setting up .venv-federated (once, a minute or two)"
	test -x .venv-federated/bin/python || $(PYTHON) -m venv .venv-federated
	.venv-federated/bin/python -m pip install --quiet --disable-pip-version-check -e ".[federated]" pytest hypothesis
	touch $@

# Known privacy errors, planted one by one: each must be caught, and the tests pass without them.
planted: setup
	$(BIN)/python benchmarks/planted.py

# Attacks every release and every method; some minutes. Writes docs/results/audit.{md,json}.
audit: setup
	$(BIN)/python benchmarks/audit.py

check: lint types

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: setup
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf .venv .venv-federated .mypy_cache .ruff_cache .pytest_cache
