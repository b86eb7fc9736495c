# make train · make test: each does all of its own set-up. PYTHON picks the interpreter, CONFIG what is trained.
PYTHON ?= python3
VENV ?= .venv$(if $(LOCKED),-locked)
CONFIG ?= configs/xcm.py
CACHE := $(or $(JAXTRAIN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxtrain)
export CARGO_TARGET_DIR ?= $(CACHE)/cargo-target

SOURCES := rust/Cargo.lock $(shell find rust/Cargo.toml rust/decode rust/core rust/python -name '*.rs' -o -name Cargo.toml)
CARGO_TEST = cargo test $(if $(LOCKED),--locked) --profile test-quick --quiet --manifest-path rust/Cargo.toml
# What is installed: to train, or to test besides. The second is the first too. With LOCKED=1, in an environment of its own, exactly
# the packages of requirements.lock, by their checksums (for Python 3.11 on Linux and x86-64), and the crates of rust/Cargo.lock.
TRAIN := $(VENV)/.installed
TEST := $(VENV)/.installed-dev
# Images of containers often forbid that bytecode is kept, and each process, hundreds of them in the tests, would compile all anew.
unexport PYTHONDONTWRITEBYTECODE
# One environment has one Python; another needs a folder of its own: make test VENV=.venv-3.13 PYTHON=python3.13.
.PHONY: checked train docs trm-demo trm-table giblet-demo higgs-demo test cargo-test test-all lint style types lint-targets lock fuzz soak wheel clean

train: $(TRAIN)
	$(VENV)/bin/python -m jaxtrain.main --config=$(CONFIG) $(ARGS)

# Two contracts of training of the recursive model on 9 × 9 boards, then rollouts on boards that neither saw: one seed, a table.
trm-demo: $(TRAIN)
	$(VENV)/bin/python -m tools.trm_table --seeds 0 --grades easy:16:24 --out runs/trm-demo $(ARGS)

# The same with three seeds and other boards: make trm-table ARGS="--seeds 0 1".
trm-table: $(TRAIN)
	$(VENV)/bin/python -m tools.trm_table $(ARGS)

# The multimodal autoencoder at a hundredth of its size, its parameters split over 8 devices that the CPU is divided into.
giblet-demo: $(TRAIN)
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
	    $(VENV)/bin/python -m jaxtrain.main --config=configs/giblet.py:demo $(ARGS)

# The audio language model from nothing: a codec, a base on some classes of sound, adapters on others; it plays them.
higgs-demo: $(TRAIN)
	$(VENV)/bin/python -m tools.demo_higgs $(ARGS)

# Four processes on two cores, since a quarter of the tests' time is waiting for runs of their own. Types, clippy and Rust's tests run
# in that time too, and what they print comes last.
# OWN_MAKE, since make -n runs each line that has make's own variable.
OWN_MAKE := $(MAKE)
test: $(TEST) style
	$(OWN_MAKE) --no-print-directory --keep-going types cargo-test >$(VENV)/types.txt 2>&1 & beside=$$!; trap 'kill $$beside' INT TERM; \
	    $(VENV)/bin/python -m pytest -m "not slow" -n 4 --dist loadfile --no-loadscope-reorder $(ARGS); \
	    python=$$?; wait $$beside; types=$$?; cat $(VENV)/types.txt; exit $$((python ? python : types))

cargo-test: $(TEST)
	$(CARGO_TEST)

# And the slow proofs, in parts of at most 80 minutes on two cores, whose results are kept in docs/results/proofs.md:
# make proofs-kills runs one of them, python -m tests.proofs --list names all.
test-all: test
	$(VENV)/bin/python -m tests.proofs

proofs-%: $(TEST)
	$(VENV)/bin/python -m tests.proofs $*

# Coverage-guided fuzzing of what reads files from elsewhere: make fuzz ARGS="--minutes 30".
fuzz: $(TEST)
	$(VENV)/bin/python -m tests.proofs.fuzz $(ARGS)

# Hours of faults in a run that nobody helps: SOAK_HOURS=3 make soak; SOAK_MODEL=language trains text in place of birds.
soak: $(TEST)
	$(VENV)/bin/python -m tests.proofs.soak $(ARGS)

# The site, in site/: built without a network. A dead link and a public name without a docstring end the build.
docs: $(TEST)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(VENV)/bin/mkdocs build --quiet && echo "site/index.html is the site; for its search: python3 -m http.server --directory site"

# The packages of LOCKED=1. Versions in requirements.lock stay where they fit; make lock ARGS=--upgrade takes the newest.
lock: $(TEST)
	{ $(VENV)/bin/python tools/needs.py dev; \
	    $(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])'; } | \
	    $(CACHE)/uv/bin/uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command="make lock" \
	    --python=$(VENV)/bin/python --output-file=requirements.lock $(ARGS) -

lint: style types

style: $(TEST)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(TEST) lint-targets
	$(VENV)/bin/mypy --cache-dir $(CACHE)/mypy
	cargo fmt --check --all --manifest-path rust/Cargo.toml
	PYO3_PYTHON=$(abspath $(VENV)/bin/python) cargo clippy --profile test-quick --quiet --workspace --all-targets --manifest-path rust/Cargo.toml -- -D warnings

# The extension's types for processors and systems that are not here: Apple silicon, and Linux on arm64, where rustup has them.
TARGETS := aarch64-apple-darwin aarch64-unknown-linux-gnu
lint-targets:
	@rustup target add $(TARGETS) >/dev/null 2>&1 || echo "the extension is not checked for $(TARGETS): rustup cannot add them"
	@for target in $$(rustup target list --installed 2>/dev/null | grep -Fx $(TARGETS:%=-e %)); do \
	    PYO3_NO_PYTHON=1 cargo check --quiet --workspace --manifest-path rust/Cargo.toml \
	    --features jaxtrain-loader-python/extension-module --target $$target || exit 1; done

# Wheels for any Linux with glibc 2.28 or newer (any Python from 3.11 on), and the source distribution.
# make wheel ARCH="x86_64 aarch64" makes them for both processors.
ARCH ?= $(shell uname -m)
DIST ?= dist
wheel:
	test -x $(VENV)-wheel/bin/python || $(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-wheel/bin/python -m pip install --quiet --group wheel
	rustup target add $(ARCH:%=%-unknown-linux-gnu)
	for arch in $(ARCH); do PATH="$(abspath $(VENV)-wheel)/bin:$$PATH" $(VENV)-wheel/bin/maturin build --release --locked --zig \
	    --compatibility manylinux_2_28 --target $$arch-unknown-linux-gnu --interpreter python3 --out $(DIST) || exit 1; done
	$(VENV)-wheel/bin/maturin sdist --out $(DIST)
	for wheel in $(DIST)/*.whl; do $(VENV)-wheel/bin/auditwheel show $$wheel || exit 1; done

clean:
	rm -rf $(VENV) loaders/_rust*.so

# An editable install, so that the extension is built again only when its sources or the package's needs change.
# The compilers of plans are not among the needs: they have environments of their own, below the cache (jaxtrain plan --setup).
# Rust takes most of the time, and one core towards its end: beside it the packages are fetched and, for the demo, its corpus made.
# For the tests, Rust's are compiled meanwhile; whether that succeeds, make test says.
BESIDE := true
AHEAD := true
ifneq ($(filter configs/xcm.py xcm,$(CONFIG)),)
ifeq ($(JAXTRAIN_XCM),)
$(TRAIN): BESIDE = $(VENV)/bin/python -m loaders.audio.demo >/dev/null
endif
endif
$(TRAIN): EXTRA := report  # for the first of the commands that a run which ended prints
$(TEST): EXTRA := dev
$(TEST): AHEAD = $(CARGO_TEST) --no-run
# Python compiles what it imports once here: pytest's processes begin together, and each would.
$(TEST): BESIDE = $(VENV)/bin/python -c 'import flax, jax, optax, orbax.checkpoint, pyarrow.parquet, pytest'
export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL = $(VENV)/bin/python tools/install.py $(CACHE)/uv
# What speaks against it is one line, before anything is installed.
VERSION := import sys; print(sys.version_info[:2])
checked:
	@mkdir -p "$(CACHE)" 2>/dev/null && test -w "$(CACHE)" || \
	    { echo "the cache folder $(CACHE) cannot be written; say make JAXTRAIN_CACHE=/path/to/a/folder …"; exit 1; }
	@test ! -x $(VENV)/bin/python || $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "the Python in $(VENV) is older than 3.11; remove $(VENV), or say make VENV=.venv-new …"; exit 1; }
ifneq ($(origin PYTHON),file)
	@test ! -x $(VENV)/bin/python || test "$$($(PYTHON) -c '$(VERSION)')" = "$$($(VENV)/bin/python -c '$(VERSION)')" || \
	    { echo "$(VENV) has another Python than PYTHON=$(PYTHON); say make VENV=.venv-other PYTHON=$(PYTHON) …"; exit 1; }
endif

$(TRAIN) $(TEST): pyproject.toml $(SOURCES) $(if $(LOCKED),requirements.lock) | checked
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) does not run, or is older than 3.11; say make PYTHON=/path/to/python3.12 …"; exit 1; }
	@command -v cargo >/dev/null || { echo "cargo is missing; a Rust toolchain (rustup) builds the loader"; exit 1; }
	@echo "installing into $(VENV), and building the loader: some minutes the first time"
ifdef LOCKED
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	@MATURIN_PEP517_ARGS=--locked PATH="$(abspath $(VENV))/bin:$$PATH" \
	    $(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	@test -x $(VENV)/bin/python || { $(PYTHON) -m venv --without-pip $(VENV) && $(INSTALL) pip; }
	@$(VENV)/bin/python tools/needs.py $(EXTRA) >$(VENV)/needs.txt
	@$(INSTALL) --no-deps --force-reinstall --editable . & building=$$!; { $(AHEAD) || true; } >/dev/null 2>&1 & \
	    $(INSTALL) --requirement $(VENV)/needs.txt && { $(BESIDE) || true; } && wait $$building
endif
	@touch $(TRAIN) $@
