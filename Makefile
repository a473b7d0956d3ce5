# make demo: sweep, cut and look into the bundled model; ends with a report.
# make quick: all checks that are fast, for while you work.   make test: all checks.
# make fuzz-quick: some hundred commands on damaged input.    make fuzz CASES=4000 SEED=7: as many as you like.
# make crash: every verb that writes killed, stopped, starved and raced at random moments; takes half an hour.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
EXTRAS ?= eval,recover,report,dev

.PHONY: install demo quick test fuzz-quick fuzz crash lint format clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python demo/run.py

quick: $(READY) lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow" --durations 5

test: $(READY) lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

fuzz-quick: $(READY)
	$(BIN)/python tests/fuzz/run.py --cases 240 --seed 0

CASES ?= 4000
SEED  ?= 1
fuzz: $(READY)
	$(BIN)/python tests/fuzz/run.py --cases $(CASES) --seed $(SEED)

crash: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash_suite.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
