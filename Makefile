# Everything runs in .venv, which is made and filled as needed; a second run finds it there.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test interop quick references check bench docs clean reproduce-quick results
help:
	@echo "make demo   fit a model to the bundled data set and write runs/demo"
	@echo "make test   run the tests"
	@echo "make quick  run the laws and references on the first example of every function"
	@echo "make references  every function with its reference and the largest deviation from it"
	@echo "make interop  train kapsi models in Lightning and skorch"
	@echo "make check  lint, types, docs"
	@echo "make reproduce-quick  run every experiment of the paper with a tiny budget, a minute"
	@echo "make results  write the pages and pictures of results/ from what is stored there"
	@echo "make bench  speed and memory against the alternatives, 10 minutes (make bench BENCH=--quick: one)"
	@echo "make docs   build the documentation into docs/_build"
	@echo "make clean  remove .venv and everything built"

.venv/.made:
	@test -n "$(PYTHON)" || { echo "kapsi needs Python 3.11 or newer; none was found (make PYTHON=/path/to/python)" >&2; exit 2; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

# One stamp an extra: demo needs no test tools, and nothing is installed twice.
.venv/.base: .venv/.made pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@
.venv/.test .venv/.check .venv/.docs .venv/.interop: .venv/.%: .venv/.base
	$(INSTALL) -e ".[$*]"
	@touch $@

demo: .venv/.base
	$(BIN)/kapsi demo --output runs/demo --overwrite

test: .venv/.test
	$(BIN)/python -m pytest -n auto --dist worksteal -q

quick: .venv/.test
	$(BIN)/python -m pytest -n auto -q -m "not slow and not thorough" tests/test_laws.py tests/test_functions.py

interop: .venv/.interop
	$(BIN)/python -m pytest -q tests/test_interop.py

references: .venv/.test
	cd tests && ../$(BIN)/python -m references

reproduce-quick: .venv/.base
	$(BIN)/kapsi reproduce all --quick

# Pictures need matplotlib, which comes with the tools of the tests.
results: .venv/.test
	$(BIN)/kapsi reproduce all --summary

check: .venv/.check .venv/.docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/sphinx-build -E -q -W --keep-going -b html docs docs/_build/html

docs: .venv/.docs
	$(BIN)/sphinx-build -E -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# One benchmark compares with inkan, whose only dependency is torch; without it that comparison is left out.
.venv/.bench: .venv/.base
	@if $(INSTALL) --no-deps inkan==0.5.2; then touch $@; else echo "inkan cannot be installed; its figures are left out" >&2; fi

bench: .venv/.bench
	$(BIN)/python benchmarks/run.py $(BENCH)

clean:
	rm -rf .venv docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build build dist
