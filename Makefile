# Everything here sets itself up: `make demo` and `make test` need only Python 3.11+, pip and make.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c

# Say what is printed, not what is run.
.SILENT:
.PHONY: demo test test-federated check setup browser clean

setup: .venv/ready

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "understudy needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	echo "setting up .venv (once, a minute or two)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: setup
	run=runs/digits-psg-eps10; n=1
	while [ -e "$$run" ] || [ -e "$$run.partial" ]; do n=$$((n + 1)); run=runs/digits-psg-eps10-$$n; done
	$(BIN)/understudy generate digits --method psg --epsilon 10 --out "$$run" --ledger runs/ledger.sqlite
	$(BIN)/understudy evaluate "$$run"
	$(BIN)/understudy verify "$$run" --ledger
	$(BIN)/understudy report "$$run" --ledger
	$(BIN)/understudy report "$$run" --shareable
	echo "Open $$run/private/report.html; $$run-report.html is the part of it that may be shared"

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

test: check browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Flower pins versions of what the rest needs too, so it has an environment of its own.
test-federated: .venv-federated/ready
	.venv-federated/bin/python -m pytest tests/federated

.venv-federated/ready: pyproject.toml
	echo "setting up .venv-federated (once, a minute or two)"
	test -x .venv-federated/bin/python || $(PYTHON) -m venv .venv-federated
	.venv-federated/bin/python -m pip install --quiet --disable-pip-version-check -e ".[federated]" pytest
	touch $@

check: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf .venv .venv-federated .mypy_cache .ruff_cache .pytest_cache
