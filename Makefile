# Everything runs in a virtual environment of its own, which `setup` fills and the other targets call first.
#   make demo   the whole job on the packaged model, no network, under a minute
#   make test   the tests that need no GPU
#   make amx    those that depend on AMX, on the other kind of processor
#   make fast   the quick ones of them, under a minute
#   make lint   ruff, mypy and import-linter
#   make check  lint and test
#   make reliability  the attacks of docs/reliability.md, section 4, under three minutes on two cores; reliability-nightly: all of them
#   make docs   write the generated pages
#   make site   build the pages into build/site, which a browser opens and searches without a server
#   make census write docs/models.md: which model families work; VLLM=SCRIPT asks vLLM too (benchmarks/census/engine.py)
#   make engines  whether the plug-ins fit the newest vLLM and SGLang, into docs/serving.md
#   make real   two real models by each recipe: make, quantize, judge, verify, chat; REAL has options, such as REAL='--only rtn default'
#   make gpu    GPU tests and benchmarks; writes benchmarks/gpu/
# PYTHON chooses the interpreter (3.10 to 3.14), VENV where the environment lies.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

# Without compiled files each process would compile the tests again, which takes as long as 300 of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo fast test amx lint docs site census engines check real gpu reliability reliability-nightly

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Runs the programs of benchmarks/study; its dependencies are clients of other people's models.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps evalplus
	touch $@

demo: setup
	$(BIN)/quantkit demo

# Two processes of one thread each: threads that share two cores wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" -n 2 --dist worksteal

# The tests of what asks for AMX, as if this processor had it; as if it had none, if it has.
AMX := $(addprefix tests/models/test_,block_runner.py interception.py modules.py)
AMX += $(addprefix tests/calibration/,stages/test_tune.py stages/test_gradients.py test_backward.py)
amx: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" --flip-amx $(AMX)

# The tests of an edit-run loop.
FAST := tests/core tests/io tests/checkpoint tests/layouts tests/text/test_sequences.py tests/recipes/test_recipe.py
FAST += $(addprefix --ignore=tests/layouts/test_,compatibility.py configs.py loads_elsewhere.py)
FAST += --ignore=tests/checkpoint/test_low_bit_sources.py
fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" -n 2 --dist worksteal $(FAST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# docs/cli.md, docs/api.md and docs/conversions.md
docs: setup
	$(BIN)/python docs/generate.py

site: setup
	$(BIN)/python docs/site_source.py build/pages
	$(BIN)/zensical build --strict

# Quantize a tiny model of every family that transformers knows, in some 15 minutes. VLLM names a script that asks vLLM
# (benchmarks/census/vllm_folder.py), in some 45 minutes more.
census: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.census -o benchmarks/census.json $(if $(VLLM),--vllm $(VLLM))
	$(if $(VLLM),$(BIN)/python -m benchmarks.census.draft_table --vllm $(VLLM) -o benchmarks/census.json)
	$(if $(VLLM),$(BIN)/python -m benchmarks.census.ends $(VLLM) benchmarks/census.json)
	$(BIN)/python -m benchmarks.census.page benchmarks/census.json docs/models.md

# Fetches some 600 MB for the first time, into build/engines. VLLM_CHECK names an environment to use instead.
engines: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.engines.watch docs/serving.md

check: lint test

# Both fail if a family of attacks ran fewer cases than it must.
reliability: setup
	$(BIN)/python -m tests.reliability -o build/reliability.json

reliability-nightly: setup
	$(BIN)/python -m tests.reliability --column nightly -o benchmarks/reliability.json
	$(BIN)/python -m tests.reliability.page benchmarks/reliability.json docs/reliability.md

# Downloads some 600 MB, the models and the texts, and wants a GPU: benchmarks/README.md says how to run it without a network.
real: setup
	$(BIN)/python -m benchmarks.real $(REAL)

# GPU tests and benchmarks, with the Python that has a CUDA build of torch: make gpu PYTHON=python3 REFERENCE=...
gpu:
	PYTHON=$(PYTHON) benchmarks/gpu.sh
