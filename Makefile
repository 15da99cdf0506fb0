# make bench   the benchmark, on whatever this machine has        make test   the tests
# make lint    what .ci/run asks of the source                    make wheel  builds the wheel and tries it elsewhere
#
# Each makes .venv first where it is missing or older than what it is made of. ARGS goes to the command:
# make bench ARGS="--help"; make test ARGS="-k compiler".

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.ready
PIP_INSTALL := -m pip install --disable-pip-version-check -c constraints.txt

# On Linux, torch from PyPI brings gigabytes of CUDA libraries. A machine without an NVIDIA driver takes the CPU build;
# where that page cannot be reached, pip says so and goes on with the indexes that it is configured for. Torch comes alone
# (what it needs comes with the package), as pip would look at the page again for each of the others.
TORCH := --no-deps --retries 1 torch==2.13.0
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH += --find-links https://download.pytorch.org/whl/cpu/torch/
endif
endif

.PHONY: bench test lint wheel clean

bench: $(READY)
	$(BIN)/sparse-flash bench $(ARGS)

# One thread for each worker: threads that wait for each other on busy cores spin, and tests become many times slower.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Into an environment of its own and run from outside the checkout, so that only what is in the wheel can be imported.
wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m build --quiet --wheel
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && set -e && \
	$(BIN)/python -m venv "$$directory/venv" && \
	"$$directory/venv/bin/python" $(PIP_INSTALL) $(TORCH) && \
	"$$directory/venv/bin/python" $(PIP_INSTALL) dist/*.whl && \
	cd "$$directory" && \
	venv/bin/python -c 'import sparse_flash.patterns, sparse_flash.benchmarks; print(sparse_flash.patterns.__file__)' && \
	venv/bin/sparse-flash doctor

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing). Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) $(TORCH)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
