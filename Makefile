# Two commands do all the set-up on a fresh machine: `make lab` and `make test`. `make demo` needs no browser.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export TOKENIZERS_PARALLELISM ?= false
# Jupyter asks root, in a container say, to be explicit.
ROOT := $(shell test "$$(id -u)" = 0 && echo --allow-root)

# A notebook shares its cores with a browser: threads that spin while they wait then cost five times more than they
# save. Measurements do not set this (docs/LOG.md).
lab: export OMP_WAIT_POLICY ?= passive

.PHONY: help lab demo test fast lint mutants site model chromium compiler clean

help:
	@echo "make lab    environment, model, and JupyterLab open on the start notebook"
	@echo "make demo   policies A to D, best-first and plain decoding on a handful of prompts, in the terminal"
	@echo "make test   environment, then every test"
	@echo "make fast   the tests that need no model and no patience"
	@echo "make lint   ruff and mypy"
	@echo "make mutants  the mutation run of docs/MUTATION.md (an hour or more)"
	@echo "make site   the notebooks, run, as static pages in site/ (minutes)"

# One environment for everything; rebuilt when a range or a pin changes.
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing treespec and its dependencies into $(VENV) (a few minutes, once) …"
	@$(PIP) install --quiet -c constraints.txt -e ".[lab,test]"
	@touch $@

model: $(VENV)/.ready
	@$(BIN)/python -c "from treespec.pairs import embedded_target; print('embedded target:', embedded_target())"

lab: model
	@$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ROOT) $(LAB_ARGS)

demo: model
	@$(BIN)/treespec compare --limit 6 --max-new-tokens 32 --fast cpu \
	  --policies "plain,linear:gamma=5,uniform:depth=4,width=3,threshold,dynamic,bestfirst:budget=11"

# Debian's chromium drives the browser tests; without root and apt they are skipped, visibly.
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	  || echo "no chromium: browser tests will be skipped"

# A C compiler builds the CPU kernel at first use; without one its tests are skipped, visibly, and decoding is slower.
compiler:
	@command -v cc >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc libc6-dev >/dev/null; } \
	  || echo "no C compiler: the CPU kernel's tests will be skipped"

# Tests share the cores, one thread each, and those of a file share a process and what it set up; browsers, whose
# response is timed, come after them and have the machine alone.
# (Two at a time they took 9:12 instead of 8:44 minutes, and some opened after 73 of the 90 seconds that they wait.)
WORKERS ?= 2
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: model chromium compiler
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SHARED) -m "not browser"
	@$(BIN)/python -m pytest -m browser

fast: $(VENV)/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SHARED) -m "not slow and not browser and not thorough"

lint: $(VENV)/.ready
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# Faults put in on purpose: which of them do the tests notice? Not part of CI. `mutmut results` lists the survivors.
mutants: $(VENV)/.ready
	@$(PIP) install --quiet -c constraints.txt -e ".[mutation]"
	@OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(WORKERS) $(MUTANTS)
	@$(BIN)/mutmut results

site: model
	@OMP_WAIT_POLICY=passive $(BIN)/python -m benchmarks.site --out site

clean:
	rm -rf $(VENV) site build dist
