# `make help` lists the targets. Commands run in .venv, which `make setup` creates from the pinned CPU
# requirements. PYTHON=path/to/python uses that interpreter instead and installs nothing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup data corpus corpus-large study train reproduce pages site lint clean \
    test test-all test-cluster

VENV := .venv
ifeq ($(origin PYTHON),undefined)
PY := $(VENV)/bin/python
SETUP := $(VENV)/.installed
else
PY := $(PYTHON)
SETUP :=
endif

# Variables that can be set on the command line, as in make train CONFIG=configs/tiny_muon.yaml
# NPROC=1 ARGS="train.steps=50"
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
CONFIG ?= configs/tiny_sso.yaml
NPROC ?= 2
ARGS ?=
JOBS ?= 1
CORPUS_ARGS ?=
STUDIES ?= llama llama_neighbours qwen3 qwen3_neighbours

ENGINE ?= 0.19.2

# Pages with generated content, and the programs that print them.
LINKING := README.md CONTRIBUTING.md docs/spectral.md docs/pc_layers.md
PAGES := $(addprefix docs/,configuration.md papers.md models.md parallelism.md) $(LINKING)
made-docs/configuration.md := -m training.config.manual
made-docs/papers.md := scripts/paper.py --page
made-docs/models.md := -m tests.tiny_families
made-docs/parallelism.md := -m tests.support_matrix
$(foreach page,$(LINKING),$(eval made-$(page) := -m tests.line_links $(page)))

# Parts of `make test` and their folders. PARTS="unit smoke" runs only these two.
PARTS ?= ranks rehearsal smoke unit
unit := tests/unit tests/parity tests/gpu
ranks := tests/distributed
rehearsal := tests/rehearsal
smoke := tests/smoke

# Parts of the slow tests and their files. PART="recipes engine" runs only these two. `make test-all`
# runs all parts except engine in a single pytest process, so that cores do not sit idle waiting for
# the last file of each part.
recipes := $(wildcard tests/unit/recipes tests/*/test_*recipes.py)
studies := $(wildcard tests/unit/*/test_*study*.py tests/distributed/test_*study*.py)
examples := tests/unit/test_examples.py
fuzz := $(wildcard tests/unit/test_fuzz*.py)
other := $(addprefix --ignore=,$(recipes) $(studies) $(examples) $(fuzz) tests/cluster)
slow-%: FILES = $($*)
slow-ranks: FILES = $(ranks) $(other)
slow-rehearsal: FILES = $(rehearsal) $(other)
slow-rest: FILES = tests $(addprefix --ignore=,$(ranks) $(rehearsal)) $(other)
slow-whole: FILES = tests --ignore=tests/cluster
SLOW_PARTS := $(addprefix slow-,recipes ranks rehearsal studies examples fuzz rest whole)

# Tests that depend on the megatron-core version.
ENGINE_SLOW_TESTS := $(patsubst %,tests/distributed/test_%.py, layouts export_on_ranks)
ENGINE_TESTS := $(ENGINE_SLOW_TESTS) tests/unit/models tests/parity \
    $(patsubst %,tests/distributed/test_%.py, gradients comm_volume state pc runs)

# Run all tests in a file on the same worker, because they share expensive fixtures.
PYTEST = $(PY) -m pytest -q -rfEs --processor-seconds -n 3 --dist loadfile --no-loadscope-reorder
timed = @trap 'echo "== $@: $$SECONDS s"' EXIT; echo "== $@"; $(1)

# Without bytecode caches, every process would recompile the project, and pytest the tests.
unexport PYTHONDONTWRITEBYTECODE

# For small matrices, one thread per rank is faster than several threads competing for cores.
export OMP_NUM_THREADS := 1

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 12

setup: $(SETUP)  ## create .venv with the pinned CPU requirements

$(VENV)/.installed: requirements/torch.txt requirements/cpu.txt requirements/constraints.txt
	@"$(BASE_PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Spectrain needs Python 3.11 or newer, got %d.%d; set BASE_PYTHON=path to use another interpreter" % v[:2])'
	"$(BASE_PYTHON)" -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_ARGS) -r requirements/torch.txt
	$(VENV)/bin/python -m pip install $(PIP_ARGS) -r requirements/cpu.txt
	@touch $@

data: data/demo/manifest.json  ## prepare the bundled corpus in data/demo

data/demo/manifest.json: scripts/prepare_data.py $(wildcard examples/data/*.xz) | $(SETUP)
	$(PY) scripts/prepare_data.py --demo --output data/demo
	@touch $@

corpus: data/corpus/manifest.json  ## prepare a 52 MB corpus from Debian packages in data/corpus

data/corpus/manifest.json: examples/data/corpus.yaml | $(SETUP)
	$(PY) scripts/make_corpus.py data/corpus_texts $(CORPUS_ARGS)
	$(PY) scripts/prepare_data.py $(foreach set,manuals prose reference,$(set)=data/corpus_texts/$(set).jsonl) \
	    --train-tokenizer 2048 --validation-fraction 1/32 --output data/corpus
	@touch $@

corpus-large: data/corpus_large/manifest.json  ## prepare the same corpus plus the Linux manuals, 76 MB, in data/corpus_large

data/corpus_large/manifest.json: examples/data/corpus_large.yaml examples/data/corpus.yaml | $(SETUP)
	$(PY) scripts/make_corpus.py data/corpus_large_texts --corpus examples/data/corpus_large.yaml
	$(PY) scripts/prepare_data.py $(foreach set,manuals prose reference kernel,$(set)=data/corpus_large_texts/$(set).jsonl) \
	    --train-tokenizer 2048 --validation-fraction 1/32 --output data/corpus_large
	@touch $@

study: data/corpus/manifest.json  ## tune and compare the optimizers (about six hours on one core; JOBS=2 uses two cores)
	for name in $(STUDIES); do \
	    $(PY) scripts/study.py studies/optimizers/$$name.yaml runs/optimizers/$$name \
	        --results studies/optimizers/results/$$name --jobs $(JOBS); \
	done

train: data/demo/manifest.json | $(SETUP)  ## pretrain the tiny model on two CPU ranks
	$(PY) pretrain.py --ranks $(NPROC) --config $(CONFIG) $(ARGS)

test: $(SETUP)  ## run the tests required for every change (five to fifteen minutes on two cores)
	$(call timed,$(PYTEST) -m "not slow" $(foreach part,$(PARTS),$(or $($(part)),$(error PARTS has no $(part)))))

test-all: $(if $(PART),$(PART:%=slow-%),test .engines/$(ENGINE) slow-whole slow-engine)  ## run all tests, including slow ones; PART="recipes fuzz" runs only these slow tests

$(SLOW_PARTS): slow-%: $(SETUP)
	$(call timed,$(PYTEST) -m slow $(FILES) || [ $$? = 5 ])

slow-engine: .engines/$(ENGINE)
	$(call timed,export PYTHONPATH=$<; $(PYTEST) -m "not slow" $(ENGINE_TESTS); $(PYTEST) -m slow $(ENGINE_SLOW_TESTS))

# Wheels are only published for some Python versions, but the files used here run on others too.
.engines/%: | $(SETUP)
	$(PY) -m pip install $(PIP_ARGS) --target $@ --no-deps --only-binary=:all: --ignore-requires-python \
	    --python-version 3.12 megatron-core==$*

# Not part of `make test`, because it requires root and is slow. It lists missing programs.
test-cluster: $(SETUP)  ## test rank, node and link failures on two nodes in namespaces, with and without SLURM (requires root, 20 minutes)
	$(PY) -m pytest -q -s -rs --durations=5 tests/cluster

reproduce: $(SETUP)  ## run the papers' synthetic experiments and check their numbers
	$(PY) scripts/reproduce.py --output runs/reproduce --format png

pages: $(SETUP)  ## regenerate the generated pages and tables
	@$(foreach page,$(PAGES),$(PY) $(made-$(page)) > $(page).new; mv $(page).new $(page);)

site: $(SETUP)  ## build a searchable documentation site in site/
	$(PY) -m mkdocs build --strict

lint: $(SETUP)  ## check style, formatting, types, shell scripts, Dockerfile and generated pages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(dir $(PY))shellcheck .ci/run scripts/*.sh scripts/slurm/*.sbatch
	$(dir $(PY))hadolint Dockerfile
	@$(foreach page,$(PAGES),$(PY) $(made-$(page)) | diff -u $(page) - || { echo "$(page) is out of date: run make pages"; exit 1; };)

clean:  ## remove the environment, prepared data and caches
	rm -rf $(VENV) .engines data .pytest_cache .mypy_cache .ruff_cache .hypothesis
