# make demo: sweep, cut and look into the bundled model; ends with a report.
# make quick: all checks that are fast, for while you work.   make test: all checks.
# make fuzz-quick: some hundred commands on damaged input.    make fuzz CASES=4000 SEED=7: as many as you like.
# make wheel: wheel and sdist, installed in an empty environment that runs the quickstart. make docs: the site.
# make crash: every verb that writes killed, stopped, starved and raced at random moments; takes half an hour.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
EXTRAS ?= fla,eval,recover,report,docs,dev

.PHONY: install demo quick test fuzz-quick fuzz crash wheel docs lint format clean

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

# WHEEL= installs all dependencies anew, which takes minutes
WHEEL ?= --borrow $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
wheel: $(READY)
	$(BIN)/python .ci/wheel.py $(WHEEL)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
