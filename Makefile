# `make demo` and `make test` are all a fresh machine needs: each builds .venv first, once.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
BENCH_INSTALLED := $(VENV)/installed-bench
MUTATION_INSTALLED := $(VENV)/installed-mutation
DOCS_INSTALLED := $(VENV)/installed-docs
HUGGINGFACE_INSTALLED := $(VENV)/installed-huggingface
TYPED := build/typecheck
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard insum_ops/*/__init__.py))

# The files that have tests for Triton's interpreter, which runs kernels on CPU tensors: each such test is marked.
INTERPRETED := $(shell grep -rlE --include='test_*.py' 'mark\.(kernels|every_route)' tests)
CROSS := $(wildcard tests/cross)
# Bytecode is written, whatever the environment says: without it each worker of each step rewrites the assertions of all
# test files again. Of packages pip writes none: what is imported is a small part of their files.
export PYTHONDONTWRITEBYTECODE :=
PIP = $(RUN) -m pip install --quiet --no-compile --constraint constraints.txt
# One thread to a worker: two workers with two threads each would fight over two cores.
# A worker takes tests that stand together, whose files' fixtures are then made once, and what another has left over.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo doctor install-all test test-cpu test-interpreter test-cross test-bench test-huggingface test-torch torch-page test-types test-thorough test-gpu test-wheel test-sdist fuzz fuzz-values sanitize mutants bench bench-compare bench-report docs docs-serve lint format clean
.NOTPARALLEL:

demo: $(INSTALLED)
	$(RUN) -m insum_ops demo

doctor: $(INSTALLED)
	$(RUN) -m insum_ops doctor

# What is compiled for GPUs that are not there shares a session with what runs on this CPU: each session is set up again.
test: $(INSTALLED)
	$(PYTEST) tests --ignore=tests/benchmarks -m 'not kernels'
	$(MAKE) test-interpreter

test-cpu: $(INSTALLED)
	$(PYTEST) tests --ignore=tests/cross --ignore=tests/benchmarks -m 'not kernels'

# A process that has interpreted a kernel can no longer compile one, so this step has its own.
test-interpreter: $(INSTALLED)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) -m 'kernels or every_route'

test-cross: $(INSTALLED)
ifneq ($(CROSS),)
	$(PYTEST) $(CROSS)
endif

# The benchmarks' own: their cases, results and report, whose page is opened in Chromium where there is one.
test-bench: $(BENCH_INSTALLED)
	$(PYTEST) tests/benchmarks

# Models of Hugging Face's transformers, which takes 170 MB and seconds to import: `make test` skips these tests without it.
test-huggingface: $(HUGGINGFACE_INSTALLED)
	HF_HUB_OFFLINE=1 $(PYTEST) tests/linear/test_huggingface.py

# All of them, with every case of every table and many random examples.
test-thorough:
	INSUM_TESTS=thorough $(MAKE) test test-bench

# What needs a GPU, or many cores, may run elsewhere: RUN=python3 takes a Python that has all of it, in the place of .venv.
SET_UP := $(if $(filter $(VENV)/%,$(RUN)),$(INSTALLED))

# Every entry point in every tool of torch; what the cells give is stored, and docs/use/torch-tools.md written from it.
# A machine with a GPU runs what needs one: make test-torch RUN=python3 JOBS=16 ONLY='GPU or capture', which takes the cells
# whose names have one of these words; CXX=/usr/bin/g++ where that is another. Its tests/torch_table/cells.json comes
# into the page of another checkout by: make torch-page CELLS=path/to/cells.json
ONLY ?=
test-torch: $(SET_UP)
	INSUM_TESTS=torch $(PYTEST) tests/torch_table$(if $(ONLY), -k '$(ONLY)')

CELLS ?=
torch-page: $(SET_UP)
	$(RUN) tests/torch_table/stored_cells.py $(CELLS)

# What a GPU runs of the tests: every case of all but those marked `cpu`, with the config that comes first in the place of a tuned one.
GPU_JOBS ?= $(shell nproc)
test-gpu: $(SET_UP)
	@$(RUN) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu needs a GPU that torch can use")'
	INSUM_TESTS=thorough INSUM_TUNE=off OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(GPU_JOBS) --dist worksteal -q -p no:cacheprovider tests --ignore=tests/cross

# The wheel under other Pythons that have torch: make test-wheel PYTHONS='python3.10 python3.12'
PYTHONS ?= $(RUN)
test-wheel: $(INSTALLED)
	$(RUN) tests/try_wheel.py $(PYTHONS)

# The sdist, unpacked in a folder of its own: its tests with its files and nothing of this checkout. SDIST_TESTS=test-cpu
# runs a part of them.
SDIST_TESTS ?= test
test-sdist: $(INSTALLED)
	$(RUN) tests/try_sdist.py $(SDIST_TESTS)

# What type checkers make of a program that uses the package: of its editable install, and of its wheel.
test-types: $(INSTALLED)
	$(RUN) tests/try_types.py

# Random statements built for GPUs that need not be there; the last line counts. FUZZ_SEED=1 draws others.
FUZZ_KERNELS ?= 2000
FUZZ_SEED ?= 0
fuzz: $(SET_UP)
	PYTHONPATH=. $(RUN) tests/cross/fuzz.py --kernels $(FUZZ_KERNELS) --seed $(FUZZ_SEED) --jobs $(JOBS)

# Random statements and small models, called and trained again and again over other tensors, beside plain torch in float64:
# on a GPU if there is one, half of the processes with tuning. A finding begins with how it is run alone.
FUZZ_SECONDS ?= 100
fuzz-values: $(SET_UP)
	PYTHONPATH=.:tests $(RUN) tests/fuzz_values.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --jobs $(JOBS)
	PYTHONPATH=.:tests $(RUN) tests/fuzz_models.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --jobs $(JOBS)

# Kernels under NVIDIA's compute-sanitizer, and the same calls again and again.
SANITIZER_TOOLS ?= memcheck racecheck
sanitize: $(SET_UP)
	PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(RUN) tests/sanitize.py --tools $(SANITIZER_TOOLS)

# Do the tests bite? STAGES=compiler/binding/bind.py tries one file.
STAGES ?=
mutants: $(MUTATION_INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) tests/mutants.py --jobs $(JOBS) $(STAGES)

# Measures what this machine can: every case on a GPU, small ones on a CPU. CASES=bench/cases/test_host.py runs one experiment.
# BENCH_JOBS=14 builds kernels in so many processes while one of them has the GPU; a run that was cut short goes on with the next.
CASES ?= bench/cases
RESULTS ?= build/bench/results.json
BENCH_JOBS ?= 1
BENCH = $(RUN) -m pytest $(CASES) -q -rs --benchmark-quiet$(if $(BENCH_OPTIONS), $(BENCH_OPTIONS))
bench: $(if $(filter $(VENV)/%,$(RUN)),$(BENCH_INSTALLED))
	@mkdir -p $(dir $(RESULTS))
ifeq ($(BENCH_JOBS),1)
	$(BENCH) --benchmark-json=$(RESULTS)
else
	INSUM_BENCH_ROWS=$(RESULTS)l INSUM_BENCH_LOCK=$(RESULTS).lock $(BENCH) -n $(BENCH_JOBS) || [ $$? -eq 5 ]
	INSUM_BENCH_ROWS=$(RESULTS)l $(BENCH) -p no:xdist -m alone || [ $$? -eq 5 ]
	$(RUN) -m bench merge $(RESULTS) $(RESULTS)l
endif

# Fails if a ratio to a peer shrank since the stored run: STORED=file, or bench/results/ for machines like this one.
bench-compare: bench
	$(RUN) -m bench compare $(RESULTS) $(STORED)

bench-report: $(BENCH_INSTALLED)
	$(RUN) -m bench report $(RESULTS)

# The documentation site, as a folder that opens without a server: build/docs/index.html. A broken link fails it.
STORED_RUN := bench/results/nvidia-h200.json
DOCS_PAGES := build/docs-pages/measured/report.html $(if $(wildcard bench/statement_page.py),build/docs-pages/statements.html)
docs: $(DOCS_INSTALLED) $(DOCS_PAGES)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# The same while it is written: each change is shown at http://127.0.0.1:8000.
docs-serve: $(DOCS_INSTALLED) $(DOCS_PAGES)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

# Pages that are whole files by themselves, made anew where what they are made of has changed.
build/docs-pages/measured/report.html: $(wildcard bench/*.py bench/*.css) $(STORED_RUN) | $(BENCH_INSTALLED)
	$(RUN) -m bench report $(STORED_RUN) --out build/docs-report
	@mkdir -p $(@D) && cp build/docs-report/report.html $@

build/docs-pages/statements.html: $(wildcard bench/*.py bench/*.css bench/*.js bench/results/statements/*.json compiler/*/*.py) | $(BENCH_INSTALLED)
	@mkdir -p $(@D)
	$(RUN) -m bench statements --out $@

# formats/ and compiler/ are imported as insum_ops.formats and insum_ops.compiler: mypy reads them where they are imported.
lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	rm -rf $(TYPED)
	mkdir -p $(TYPED)/insum_ops
	ln -s $(addprefix $(CURDIR)/,$(wildcard insum_ops/*.py) $(PACKAGES) insum_ops/py.typed formats compiler) $(TYPED)/insum_ops
	cd $(TYPED) && $(CURDIR)/$(RUN) -m mypy --config-file $(CURDIR)/setup.cfg -p insum_ops

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

define venv_with_torch
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || { echo "insum_ops needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
    || { echo "python3 can't make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
$(PIP) $$(grep '^torch==' constraints.txt) setuptools wheel
endef

$(INSTALLED): setup.cfg setup.py pyproject.toml constraints.txt
	$(venv_with_torch)
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

# What .ci/run needs, by one call of pip.
install-all:
	$(venv_with_torch)
	$(PIP) --no-build-isolation --editable '.[test,bench,docs,huggingface]'
	@touch $(INSTALLED)
	@touch $(BENCH_INSTALLED) $(DOCS_INSTALLED) $(HUGGINGFACE_INSTALLED)

$(BENCH_INSTALLED): $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

$(HUGGINGFACE_INSTALLED): $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[huggingface]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

$(MUTATION_INSTALLED): $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[mutation]'
	@touch $@
