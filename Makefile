# make train · make test: each does all of its own set-up. PYTHON picks the interpreter, CONFIG what is trained.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/xcm.py
CACHE := $(or $(JAXTRAIN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxtrain)
export CARGO_TARGET_DIR ?= $(CACHE)/cargo-target

SOURCES := rust/Cargo.lock $(shell find rust/Cargo.toml rust/core rust/python -name '*.rs' -o -name Cargo.toml)
CARGO_TEST = cargo test --profile test-quick --quiet --manifest-path rust/Cargo.toml
STAMP := $(VENV)/.installed
.PHONY: train trm-demo giblet-demo higgs-demo test test-all lint clean

train: $(STAMP)
	$(VENV)/bin/python -m jaxtrain.main --config=$(CONFIG) $(ARGS)

# The recursive model from nothing on generated boards: 4 × 4, then 9 × 9 with few blanks; held-out boards at every evaluation.
trm-demo: $(STAMP)
	$(VENV)/bin/python -m jaxtrain.main --config=configs/trm_sudoku.py:4x4 $(ARGS)
	$(VENV)/bin/python -m jaxtrain.main --config=configs/trm_sudoku.py:9x9 $(ARGS)

# The multimodal autoencoder at a hundredth of its size: on 8 host devices, in 2 processes, resumed on another mesh.
giblet-demo: $(STAMP)
	$(VENV)/bin/python -m tools.demo_giblet $(ARGS)

# The audio language model from nothing: a codec, a base on some classes of sound, adapters on others; it plays them.
higgs-demo: $(STAMP)
	$(VENV)/bin/python -m tools.demo_higgs $(ARGS)

test: $(STAMP) lint
	$(CARGO_TEST)
	$(VENV)/bin/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(STAMP) lint
	$(CARGO_TEST)
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	cargo fmt --check --all --manifest-path rust/Cargo.toml
	PYO3_PYTHON=$(abspath $(VENV)/bin/python) cargo clippy --profile test-quick --quiet --workspace --all-targets --manifest-path rust/Cargo.toml -- -D warnings

clean:
	rm -rf $(VENV) loaders/_rust*.so

# An editable install, so that the extension is built again only when its sources or the package's needs change.
$(STAMP): pyproject.toml $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; say make PYTHON=python3.12 …"; exit 1; }
	@command -v cargo >/dev/null || { echo "cargo is missing; a Rust toolchain (rustup) builds the loader"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@
