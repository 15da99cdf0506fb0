# make quick   lint, types and a sample of the tests that touches every room, in two minutes
# make bench   runs the benchmark on this machine, in minutes       make test   runs the tests
# make train   a small language model, dense and sparse, in two minutes     make ranks  the tests that start processes
# make lint    ruff and mypy, as .ci/run runs them                make wheel  builds sdist and wheel, and tries them outside the checkout
# make experiments  the tests of experiments/, the programs behind docs/evidence.md
# make docs    builds the documentation site into site/; ARGS=serve shows it while you write
# make kernels the tests that compile kernels for a Hopper GPU, which need not be there
# make chips   compiles changed kernels for other GPUs and updates docs/chips.csv
# make hub     writes build/torch-cuda and torch-cpu, which the Hub's kernels library loads (docs/guides/hugging-face.md)
# make golden  adds what new patterns keep to tests/patterns/golden.json
# make record  writes down what the compiled kernels of the tests spill: tests/kernels/spills.json
# make matrix  runs the tests on the oldest and the newest versions that pyproject.toml allows, and on those between whose Triton
#              neither has; PAIR=oldest, 2.12, 2.14 or newest for one
#
# Each target creates .venv first if it is missing or out of date: bench installs the package with the extra all, others also what
# tests, lint and documentation need. matrix creates .matrix/oldest and others.
# ARGS goes to the command: make bench ARGS=--full; make test ARGS="-k compiler". With COVERAGE=1, make test says which lines ran.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
BENCH := .venv/.bench
READY := .venv/.ready
PIP_INSTALL := -m pip install --disable-pip-version-check

# On Linux, torch from PyPI brings gigabytes of CUDA libraries. A machine without an NVIDIA driver gets the CPU build. If its
# page cannot be reached, pip says so and continues with the indexes that it is configured for. Torch is installed alone
# (its dependencies come with the package), because pip would look at the page again for each of them. The constraints set
# its version.
TORCH := --no-deps --retries 1 torch
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH += --find-links https://download.pytorch.org/whl/cpu/torch/
endif
endif

# Releases of torch between the oldest and the newest, each with a Triton of its own: torch's CPU builds would take the newest Triton.
BETWEEN := 2.12 2.14
TRITON_2.12 := 3.7
TRITON_2.14 := 3.8

# The Pythons of the pairs: the oldest that pyproject.toml allows, and the newest on this machine for which everything that
# the tests need has wheels (3.14 on 2026-11-22: transformers does not install on 3.15 yet).
PAIR ?= oldest $(BETWEEN) newest
OLDEST_PYTHON ?= $(call first_python,3.11)
NEWEST_PYTHON ?= $(call first_python,3.14 3.13)
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)
first_python = $(firstword $(foreach v,$(1),$(shell for python in python$(v) $(wildcard $(PYENV)/versions/$(v).*/bin/python); \
  do $$python -c "" 2>/dev/null && echo $$python && break; done)))

.PHONY: quick bench train test experiments kernels ranks linked lint docs chips golden record wheel hub matrix clean

# tests/quick.txt lists the sample: a line for each file, test or case.
quick: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) @tests/quick.txt $(ARGS)

bench: $(BENCH)
	$(BIN)/sparse-flash bench $(ARGS)

train: $(READY)
	$(BIN)/python -m examples.train_lm compare $(ARGS)

# One thread per worker: threads that wait for each other on busy cores spin, which makes tests many times slower.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(if $(COVERAGE),--cov --cov-report=) $(ARGS)
	$(if $(COVERAGE),$(BIN)/python -m coverage report --sort=cover --skip-covered)

experiments: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) experiments $(ARGS)

kernels: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m compiles -n $(WORKERS) --dist loadfile $(ARGS)

ranks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks $(ARGS)

# mypy does not know pyproject.toml's package-dir. So it reads a folder in which links make one package of the three.
linked: $(READY)
	rm -rf .venv/typed && mkdir -p .venv/typed/sparse_flash
	ln -s $(CURDIR)/sparse_flash/* .venv/typed/sparse_flash
	ln -sfn $(CURDIR)/patterns $(CURDIR)/benchmarks .venv/typed/sparse_flash

lint: $(READY) linked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd .venv/typed && ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

# Warnings are errors: broken links and anchors, pages missing from the navigation.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict)

record: $(READY)
	$(BIN)/python tests/outcomes.py

golden: $(READY)
	$(BIN)/python tests/golden.py

chips: $(READY)
	$(BIN)/python tests/chips.py $(ARGS)

# Each pair is tried even if another fails.
matrix:
	@$(MAKE) --no-print-directory --keep-going $(PAIR:%=matrix-%)

$(addprefix matrix-,oldest $(BETWEEN) newest): matrix-%: .matrix/%/.ready
	.matrix/$*/bin/sparse-flash doctor
	OMP_NUM_THREADS=1 .matrix/$*/bin/python -m pytest -n $(WORKERS) $(ARGS)

# The wheel is built from the source distribution. Installed into a separate environment and run outside the checkout, so only what is
# in the wheel can be imported: first without extras, where README's first code runs, and the command says which extra it needs.
wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m build --quiet
	directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && set -e && \
	$(BIN)/python -m venv "$$directory/venv" && \
	"$$directory/venv/bin/python" $(PIP_INSTALL) -c constraints.txt $(TORCH) && \
	"$$directory/venv/bin/python" $(PIP_INSTALL) -c constraints.txt dist/*.whl && \
	sed '1,/^```python/d; /^```/,$$d' README.md > "$$directory/first.py" && \
	(cd "$$directory" && venv/bin/python first.py && \
	! venv/bin/sparse-flash 2> said && cat said && grep -q 'pip install "sparse-flash\[cli\]"' said) && \
	"$$directory/venv/bin/python" $(PIP_INSTALL) -c constraints.txt "$$(echo dist/*.whl)[all]" && \
	cd "$$directory" && venv/bin/sparse-flash doctor && venv/bin/sparse-flash gallery

hub: $(READY)
	$(BIN)/python .ci/hub.py $(ARGS)

$(BENCH): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing). Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(call environment,$(PYTHON),constraints.txt,all)

$(READY): $(BENCH)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,docs,hub]'
	@touch $@

.matrix/oldest/.ready: pyproject.toml constraints-oldest.txt
	$(call before_matrix,oldest,OLDEST_PYTHON,3.11)
	$(call environment,$(OLDEST_PYTHON),constraints-oldest.txt,dev)

.matrix/newest/.ready: pyproject.toml constraints-newest.txt
	$(call before_matrix,newest,NEWEST_PYTHON,3.13 or newer)
	$(call environment,$(NEWEST_PYTHON),constraints-newest.txt,dev)

# Everything as in the newest pair but torch, and what torch asks one version of.
$(BETWEEN:%=.matrix/%/.ready): .matrix/%/.ready: pyproject.toml constraints-newest.txt
	$(call before_matrix,$*,NEWEST_PYTHON,3.13 or newer)
	@mkdir -p $(@D)
	sed -E '/^(torch|triton|setuptools)==/d' constraints-newest.txt > $(@D)/constraints-$*.txt
	printf 'torch==%s.*\ntriton==%s.*\n' $* $(TRITON_$*) >> $(@D)/constraints-$*.txt
	$(call environment,$(NEWEST_PYTHON),$(@D)/constraints-$*.txt,dev)

define environment
	$(1) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -c $(2) $(TORCH)
	$(@D)/bin/python $(PIP_INSTALL) -c $(2) -e '.[$(3)]'
	@touch $@
endef

define before_matrix
	@$(if $($(2)),,echo "matrix: the $(1) versions are tried on Python $(3), and none is on PATH or in $(PYENV)/versions. Install one, or name one: make matrix PAIR=$(1) $(2)=/path/to/python; the other pair alone: make matrix PAIR=$(if $(filter oldest,$(1)),newest,oldest)" >&2; exit 1)
	@echo "matrix: makes $(@D) with $($(2)), once. On Linux torch may bring its CUDA libraries: about 2 GB to fetch, 6 GB on disk."
endef

clean:
	rm -rf .venv .matrix build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
