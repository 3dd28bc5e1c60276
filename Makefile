# `make demo` turns a prompt into a video on two CPU processes; `make test` runs what CI runs.
# Both install into their own virtual environment first, which needs a package index but no GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
OUT := out/demo
TINY := $(OUT)/cogvideox-rope

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint kernels clean

help:
	@echo "make demo    generate a small video with a tiny model on two CPU processes, and its latency report"
	@echo "make test    ruff, mypy and all tests that need no GPU"
	@echo "make lint    ruff and mypy only"
	@echo "make kernels build the CUDA kernels in place with nvcc (FODIT_CUDA_ARCHS=89 for an RTX 4090 alone)"
	@echo "make clean   remove the virtual environment and everything built or generated"
	@echo
	@echo "PYTHON=...   the interpreter to make the virtual environment with (3.11 or newer; now $(PYTHON))"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "the pinned releases need Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	FODIT_SKIP_KERNELS=1 $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps nvidia-cutlass
	touch $@

$(TINY)/model_index.json: $(INSTALLED) $(wildcard fodit/testing/tiny.py)
	rm -rf $(TINY)
	mkdir -p $(OUT)
	$(BIN)/python -m fodit.testing.tiny cogvideox-rope $(TINY)
	touch $@

# The GPUs are hidden: with fewer than two of them the two processes could not run there.
demo: $(INSTALLED) $(TINY)/model_index.json
	CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	    $(BIN)/torchrun --standalone --nproc-per-node 2 \
	    demos/text_to_video.py --model $(TINY) --prompt "A paper boat sails down a rainy street" \
	    --height 64 --width 96 --num-frames 9 --steps 4 --seed 0 --ulysses 2 \
	    --output $(OUT)/video.mp4 --report $(OUT)/report.json
	@echo
	@echo "video:  $(CURDIR)/$(OUT)/video.mp4"
	@echo "report: $(CURDIR)/$(OUT)/report.json"

# CUTLASS without what its Python side needs: only its headers are used.
kernels: $(INSTALLED)
	$(BIN)/python -m fodit.kernels.build --out fodit/kernels

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

# One thread a process: the tests start up to four ranks at once.
test: $(INSTALLED) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu"

clean:
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
