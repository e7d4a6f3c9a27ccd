# `make chat` sets up and runs the main job; `make test` sets up and passes every check;
# `make test-all` runs slow tests too, all combinations of parameters and all rounds of repeated
# tests; `make test-rest` runs what `make test` left out; `make notebooks` sets up and opens the
# notebooks in JupyterLab.
PY    ?= python3
VENV  ?= .venv
BIN   := $(VENV)/bin
# how make view adds the packages; LINK="cp -R" works where links are not allowed
LINK  ?= ln -s
PARTS := graphs memory checkpointers stores
# bytecode is written: else each process that a test starts compiles all of perdure
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist worksteal
# Jupyter asks for it of root, as whom containers run
ROOT  := $(if $(filter 0,$(shell id -u)),--allow-root)
.DEFAULT_GOAL := test
.PHONY: chat notebooks docs test test-all test-rest setup check fix lint view types unit clean

chat: setup  ; $(BIN)/perdure chat --thread hello
notebooks: $(VENV)/.jupyter ; cd notebooks && $(abspath $(BIN))/jupyter lab $(ROOT) $(JUPYTER)
docs: setup view ; PYTHONPATH=build/view $(BIN)/python docs/reference.py
test: setup check
test-all: setup ; @$(MAKE) --no-print-directory check TESTS=--all
test-rest: setup ; $(PYTEST) --rest

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml
	@echo "setting up $(VENV) (about a minute) ..."
	@$(PY) -m venv $(VENV)
	@( $(BIN)/pip install --upgrade pip && $(BIN)/pip install --editable ".[encryption]" --group dev ) \
	    > $(VENV)/setup.log 2>&1 || { cat $(VENV)/setup.log >&2; exit 1; }
	@touch $@

# JupyterLab listens on localhost and opens the browser with its token; JUPYTER=--no-browser prints the address
$(VENV)/.jupyter: $(VENV)/.ready
	@echo "adding JupyterLab ..."
	@$(BIN)/pip install --group notebooks > $(VENV)/notebooks.log 2>&1 || { cat $(VENV)/notebooks.log >&2; exit 1; }
	@touch $@

# mypy without a cache takes a minute of one core, beside pytest; what it says is shown if it is bad
check: lint view
	@$(MAKE) --no-print-directory types > build/types.log 2>&1 & types=$$!; \
	    $(MAKE) --no-print-directory unit; unit=$$?; \
	    wait $$types || { cat build/types.log >&2; exit 1; }; exit $$unit
fix:   ; $(BIN)/ruff format . && $(BIN)/ruff check --fix .
lint:  ; $(BIN)/ruff format --check . && $(BIN)/ruff check .
view:  ; @rm -rf build/view build/lib && mkdir -p build/view/perdure && $(LINK) $(CURDIR)/src/perdure/* $(PARTS:%=$(CURDIR)/%) build/view/perdure/
types: view ; $(BIN)/mypy -p perdure -p tests && PYTHONPATH=build/view $(BIN)/lint-imports --no-cache
unit:  ; $(PYTEST) $(TESTS)
clean: ; rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache
