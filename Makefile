# The two commands: `make reproduce` and `make test`. `make help` lists the chores.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup reproduce paper artifact-page test check smoke lint format types lock bench expected verify archive clean

PYTHON ?= python3
PRESET ?= laptop
CORES ?= all
VENV := .venv
PEERS := .venv-bench
BIN := $(CURDIR)/$(VENV)/bin
# Quoted where it is used: the clone may lie in a path with spaces.
STAMP := $(VENV)/.installed
SNAKEMAKE = "$(BIN)/snakemake" --cores $(CORES)
export PATH := $(BIN):$(PATH)
export PYTHONDONTWRITEBYTECODE :=

help: ## list these chores
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo "  presets: smoke (3 min), laptop (30 min, default), paper (GPU); e.g. make reproduce PRESET=smoke"

setup: $(STAMP) ## create .venv with the locked environment (first time: about 5 minutes, 6 GB)

# The stamp names the lock it was made from, so a changed lock installs again and a touched one does not.
$(STAMP): envs/requirements.lock pyproject.toml
	@digest=$$(cat envs/requirements.lock pyproject.toml | "$(PYTHON)" -c 'import hashlib,sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'); \
	if [ "$$(cat $(STAMP) 2>/dev/null)" = "$$digest" ]; then touch $(STAMP); exit 0; fi; \
	"$(PYTHON)" -c 'import sys; sys.exit(None if (3,11) <= sys.version_info[:2] <= (3,13) else "Python 3.11 to 3.13 is needed, this is %s; set PYTHON=python3.11" % sys.version.split()[0])'; \
	"$(PYTHON)" -m venv $(VENV); \
	echo "Installing the locked environment into $(VENV) (about 5 minutes, 6 GB)"; \
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r envs/requirements.lock; \
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	echo "$$digest" > $(STAMP)

reproduce: setup ## fetch the data, run the whole artifact, say where the figures are (PRESET=smoke|laptop|paper)
	$(SNAKEMAKE) --config preset=$(PRESET)
	$(SNAKEMAKE) --config preset=$(PRESET) --report results/$(PRESET)/report.html
	@echo "Figures: results/$(PRESET)/figures   tables: results/$(PRESET)/tables"
	@echo "Report: results/$(PRESET)/report/reproduction.pdf   page with all figures: results/$(PRESET)/report.html"

test: setup ## unit tests, then a smoke run of the real workflow (about 7 minutes)
	"$(BIN)/python" -m pytest -n 2 -m "not slow and not smoke and not slurm" -q
	"$(BIN)/python" -m pytest -m "smoke and not slow" -q

check: test ## test, and everything marked slow (under 30 minutes)
	"$(BIN)/python" -m pytest -m "slow" -q

smoke: setup ## the smoke preset into results/smoke
	$(SNAKEMAKE) --config preset=smoke

lint: setup ## lint, format check, types, workflow lint
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/snakefmt" --check Snakefile workflow
	"$(BIN)/snakemake" --lint --config preset=smoke

format: setup ## format Python and Snakemake files
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .
	"$(BIN)/snakefmt" Snakefile workflow

verify: setup ## decide every claim of the run PRESET; non-zero exit when one fails
	$(SNAKEMAKE) --config preset=$(PRESET) --quiet -- verify

expected: setup ## make the finished run PRESET the committed reference
	"$(BIN)/python" -m curvature_gap.reference $(PRESET)

paper: setup ## renew paper/reproduction.pdf and paper/gallery from the run PRESET
	$(SNAKEMAKE) --config preset=$(PRESET) -- results/$(PRESET)/report/reproduction.pdf
	cp results/$(PRESET)/report/reproduction.pdf paper/reproduction.pdf
	"$(BIN)/python" -m curvature_gap.gallery results/$(PRESET)/figures

artifact-page: setup ## write ARTIFACT.md from claims.yaml and expected/
	"$(BIN)/python" -m curvature_gap.artifact_page

archive: setup ## pack the run PRESET for a deposit, unpack it elsewhere and verify it there
	"$(BIN)/python" -m curvature_gap.archive results/$(PRESET)

lock: ## resolve envs/requirements.in and bench.in into the hash locks (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --quiet envs/requirements.in -o envs/requirements.lock
	@# bench.lock holds only what requirements.lock lacks, at versions that agree with it.
	uv pip compile --universal --python-version 3.11 --generate-hashes --quiet --no-header -c envs/requirements.lock envs/bench.in \
	| awk '/^[a-z0-9]/ {split($$0, name, "==")} FNR == NR {have[name[1]] = 1; next} !(name[1] in have)' envs/requirements.lock - \
	> envs/bench.lock.part
	mv envs/bench.lock.part envs/bench.lock

bench: setup $(PEERS)/.installed ## time exact Hessians beside other programs into results/bench (20 quiet minutes)
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)/$(PEERS)" "$(BIN)/python" -W ignore -m curvature_gap.benchmark --output results/bench

# The peers lie beside the environment, never in it: without their dependencies, which the environment has.
$(PEERS)/.installed: envs/bench.lock | setup
	rm -rf $(PEERS)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target $(PEERS) -r envs/bench.lock
	touch $@

clean: ## remove the environment and all generated results
	rm -rf $(VENV) $(PEERS) .snakemake
	find results -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
