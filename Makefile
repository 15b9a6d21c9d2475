# Two commands for a fresh machine: `make demo` and `make test`. Each sets up all that it needs.

PYTHON ?= python3
VENV ?= .venv
# Another torch: make setup TORCH=torch==2.11.0 (pip's own PIP_INDEX_URL and friends choose where from).
TORCH ?= $(shell grep '^torch==' constraints.txt)
EXTRAS ?= dev,docs,hf,peers
ARGS ?=

BIN := $(VENV)/bin
# The names carry what was asked for, so that another TORCH or other EXTRAS install again. The demo needs no extras.
BARE := $(VENV)/.bare-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(shell echo '$(TORCH) $(EXTRAS)' | cksum | cut -d' ' -f1)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt '$(TORCH)'

.PHONY: setup demo wheel compiled test test-unit test-ranks test-jobs test-jobs-1 test-jobs-2 test-gpu test-gpu-1 test-gpu-2 fuzz slurm-test reliability chaos chaos-long check format bench docs docs-serve docs-pages planner-docs clean

setup: $(READY)

$(READY): $(BARE)
	@rm -f $(VENV)/.ready-*
	@echo 'Setting up $(VENV) (extras $(EXTRAS)) …'
	@$(INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

$(BARE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Shardwise needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Choose one: make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.bare-* $(VENV)/.ready-*
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@echo '$(TORCH)' >> $(VENV)/constraints.txt
	@echo 'Setting up $(VENV) ($(TORCH)) …'
	@$(INSTALL) -e .
	@$(BIN)/python -m compileall -q src
	@touch $@

# An answer first: a real model on real GPUs, with its cost. Then the proof that fits on this machine: a small GPT is trained
# on 4 CPU ranks at both ends and in the middle of the dial, its losses compared, its memory compared with the prediction.
# DEMO_PRICE: dollars per GPU-hour, from src/shardwise/hardware/prices.toml, which has its source.
DEMO_PRICE ?= 3.99
demo: $(BARE)
	@echo '1. Before you rent a GPU: train Llama 3.1 8B on 2 billion tokens, on 8 H100 at $$$(DEMO_PRICE) per GPU-hour'
	@echo
	@$(BIN)/shardwise plan llama-3.1-8b --cluster 8xh100-80gb --tokens 2B --price $(DEMO_PRICE)
	@echo
	@echo '2. Is a prediction right? Train a small GPT here, on 4 CPU ranks, and compare (about a minute)'
	@echo
	@$(BIN)/shardwise bench examples/demo.toml --ranks 4 --strategy ddp,zero2,fsdp --rounds 1 --steps 12 --warm-up 4 --out runs/demo --overwrite $(ARGS)
	@$(BIN)/shardwise report runs/demo
	@echo 'Open it in a browser. Next, which GPUs to rent: $(BIN)/shardwise rent llama-3.1-8b --tokens 2B --max-price 500'

# Bytecode, also where PYTHONDONTWRITEBYTECODE is set: there each process that a test starts would compile all modules again,
# and pytest would rewrite the assertions of all tests in every run.
test test-unit test-ranks test-jobs test-jobs-1 test-jobs-2: export PYTHONDONTWRITEBYTECODE =
compiled: setup
	@$(BIN)/python -m compileall -q src tests benchmarks

# What a person waits for: about 8 minutes on 2 quiet cores. Ranks mostly wait for each other, so two parts run side by
# side. With ARGS, whatever these say.
test: compiled
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-unit test-ranks
else
	@$(BIN)/python -m pytest $(ARGS)
endif

# The other tier: tests that start whole jobs, launchers, notebooks or a browser, in two parts side by side.
test-jobs: compiled
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-jobs-1 test-jobs-2

# What each part says at its end, so that it is seen what makes it long.
SLOWEST := --durations=12 --durations-min=3

# Tests that start whole jobs, and those whose ranks need transformers or Lightning, which are imported once per part; the
# ranks of the others come from a pool. Some of these others go with the unit tests, so that the parts take about equally long.
WHOLE_JOBS := accelerate autopsy bench documents integration kills launch notebooks recovery train watch
OF_LIBRARIES := asked_by_others evaluating fine_tune grad_norms lightning pretrained
BROWSER := $(shell find tests/unit -name 'test_*browser.py') tests/unit/test_site.py
LAUNCHED := $(sort $(wildcard $(patsubst %,tests/dist/test_%*.py,launch recovery train watch)))
JOBS := $(sort $(wildcard $(patsubst %,tests/dist/test_%*.py,$(WHOLE_JOBS) $(OF_LIBRARIES))))
WITH_UNIT := $(wildcard $(patsubst %,tests/dist/test_%.py,ema frozen weight_stream whole written))

test-unit:
	@$(BIN)/python -m pytest $(SLOWEST) tests/unit tests/gpu $(WITH_UNIT) $(BROWSER:%=--ignore=%)

test-ranks:
	@$(BIN)/python -m pytest $(SLOWEST) tests/dist tests/fuzz $(JOBS:%=--ignore=%) $(WITH_UNIT:%=--ignore=%)

test-jobs-1:
	@$(BIN)/python -m pytest $(SLOWEST) $(LAUNCHED)

test-jobs-2:
	@$(BIN)/python -m pytest $(SLOWEST) $(filter-out $(LAUNCHED),$(JOBS)) $(BROWSER)

# All of tests/gpu on this machine's GPU, one file after another, by the Python that has a CUDA build of torch: nothing is
# installed. `make test-gpu-1` and `make test-gpu-2` run one half each.
test-gpu:
	@$(PYTHON) scripts/test_gpu.py $(ARGS)

test-gpu-1 test-gpu-2:
	@$(PYTHON) scripts/test_gpu.py --half $(@:test-gpu-%=%) $(ARGS)

# Random models, plans and events against one process of plain torch, until stopped; ARGS="--seeds 0:1000 --ranks 3".
fuzz: setup
	@PYTHONPATH=tests:tests/dist:tests/fuzz $(BIN)/python tests/fuzz/fuzz.py $(ARGS)

# The exported sbatch script on a real SLURM on this machine (Debian: slurm-wlm), as root; otherwise skipped.
slurm-test: setup
	@$(BIN)/python -m pytest tests/slurm -rs

# Runs the tests of every known way to be silently wrong, and writes what they saw into docs/reliability.md.
reliability: setup
	@$(BIN)/python -m pytest --reliability

# Breaks jobs on purpose and prints the scorecard; the exit code is 1 if a row did not hold. On 2 quiet cores the short
# version is made for 15 minutes, the long one for 60.
chaos: setup
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

chaos-long: setup
	@$(BIN)/python benchmarks/chaos.py --long $(ARGS)

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/unit/test_layers.py
	@$(MAKE) --no-print-directory docs

# The documentation site, into build/site. A link or an anchor that leads nowhere is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'build/site/index.html (search needs a server: make docs-serve)'

# The site on this machine, with its search, which a browser does not allow in pages opened from files.
DOCS_PORT ?= 8000
docs-serve: docs
	@echo 'http://127.0.0.1:$(DOCS_PORT)/'
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site $(DOCS_PORT) > /dev/null

# Pages and pictures that are written by a command; tests compare them with what it would write now.
docs-pages: setup
	@$(BIN)/python scripts/site/pictures.py
	@$(BIN)/python benchmarks/claims.py

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The release, ready to upload: dist/shardwise-*.whl and the source archive, whether an index would take them, whether
# CHANGELOG.md has their version, and whether the wheel works in an empty environment of each Python (which needs a network).
PYTHONS ?= 3.11 3.12 3.13
wheel: setup
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	@$(BIN)/python -m twine check --strict dist/*
	@grep -q "^## $$($(BIN)/shardwise --version | cut -d' ' -f2)" CHANGELOG.md || { echo 'CHANGELOG.md has no section for this version'; exit 1; }
	@$(BIN)/python scripts/try_wheel.py dist/*.whl --pythons $(PYTHONS) --constraints $(VENV)/constraints.txt
	@echo 'Ready: $(BIN)/python -m twine upload dist/*'

# Predicts again all that docs/planner.md and docs/measured-planner.md say, and writes it there. PUBLISHED is a folder
# of tables that others published (benchmarks/published.py reads them).
planner-docs: setup
	@$(BIN)/python benchmarks/planner_docs.py --published $(PUBLISHED) $(ARGS)

bench: setup
	@$(BIN)/python benchmarks/engine_step.py --case cpu

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis
