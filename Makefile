# Two commands: `make demo` runs the main job, `make test` passes the tests.
# Both create .venv and install what is needed the first time, and are quick the second.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow lint reference install clean

demo: .venv/installed
	$(BIN)/python -m pd2bw_fx demo -o demo_out

test: lint
	$(BIN)/python -m pytest

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow -n 1

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: .venv/installed
	$(BIN)/python docs/reference.py > docs/REFERENCE.md

install: .venv/installed

# torch first and by itself: with it in place nothing else asks for another build of it.
.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf .venv demo_out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
