# Every target sets up what it needs in .venv first, and only once.
PYTHON ?= python3
PIP_ARGS ?=
INSTALL = -m pip install --quiet $(PIP_ARGS)
# Sets of versions that are tested: torch, FBGEMM and TorchRec of one release fit together.
TORCH ?= 2.13
ifeq ($(TORCH),2.13)
VENV := .venv
VERSIONS := 2.13.0 1.8.0 1.8.0
else ifeq ($(TORCH),2.14)
VENV := .venv-torch2.14
VERSIONS := 2.14.0 1.9.0 1.9.2
else
$(error TORCH=$(TORCH): only 2.13 and 2.14 are tested)
endif
# TorchRec's own metadata asks for the CUDA build of FBGEMM whatever the machine, so it is installed without its
# dependencies, and they are named here. Planning alone needs none of it: pip install flexshard.
FBGEMM := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo fbgemm-gpu || echo fbgemm-gpu-cpu)
PLANNING := .venv-newest .venv-lowest

.PHONY: help setup setup-newest setup-lowest demo docs test test-slow test-newest test-lowest test-gpu lint format bench bench-torchrec bench-recd bench-tt bench-gpu bench-cluster bench-ingest bench-lookahead clean

help:
	@echo "make demo                      plan generated data, train a model under the plan, draw the pictures"
	@echo "make demo DATA=path COLUMN=id  plan your Parquet file (KEY=session: its values are the samples)"
	@echo "make test                      run the tests; TORCH=2.14 with the newer set of torch, FBGEMM and TorchRec"
	@echo "make test-slow                 more cases of what make test tests: random models, kills of Ray's workers (takes minutes)"
	@echo "make test-newest               planning, profiling, command line: without torch, newest versions (PYTHON=python3.13)"
	@echo "make test-lowest               the same with the oldest versions that pyproject.toml allows"
	@echo "make test-gpu                  what needs one GPU: NCCL, streams, waits, memory, kernels; skipped where there is none"
	@echo "make docs                      the documents as a site, in build/site; runs the tutorial"
	@echo "make lint                      ruff and mypy --strict"
	@echo "make bench                     measure against DuckDB and Polars, the solver against its size, prices against what is called"
	@echo "make bench-torchrec            measure against TorchRec: its planner, its row-wise sharding; groups of tables, translation (takes minutes)"
	@echo "                               CHECKOUT=TorchRec's source tree: its own sharding tests and its BERT4Rec example, too;"
	@echo "                               EASYREC=TorchEasyRec's: whether it reads our export"
	@echo "make bench-recd                deduplicated batches: storage, reader, conversion, training (takes minutes)"
	@echo "make bench-ingest              reading and the ingestion service against pyarrow and Ray Data (takes minutes; CLICKS=path for real clicks)"
	@echo "make bench-lookahead           caches that know the next batches: oracle, steps, closed forms (takes minutes; CLICKS=path, LOOKUPS=path)"
	@echo "make bench-tt                  tensor-train tables against the TT-Rec algorithm (takes minutes; CLICKS=path for accuracy)"
	@echo "make bench-gpu                 on GPUs: kernels against the memory's bandwidth, steps against TorchRec's, tensor trains"
	@echo "make bench-cluster             a cluster of network namespaces: predicted against observed (needs root)"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FlexShard needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) torch==$(word 1,$(VERSIONS)) $(FBGEMM)==$(word 2,$(VERSIONS)) \
		tensordict torchmetrics==1.0.3 tqdm pyre-extensions psutil
	$(VENV)/bin/python $(INSTALL) --no-deps torchrec==$(word 3,$(VERSIONS))
	$(VENV)/bin/python $(INSTALL) --editable ".[dev]"
	touch $@

demo: setup
	$(VENV)/bin/python examples/demo.py $(if $(DATA),--data "$(DATA)") $(if $(COLUMN),--column "$(COLUMN)") \
		$(if $(KEY),--sample-key "$(KEY)")

test: setup
	$(VENV)/bin/python -m pytest -n auto --dist worksteal

test-slow: setup
	$(VENV)/bin/python -m pytest -n auto --dist worksteal -m slow

test-gpu: setup
	$(VENV)/bin/python -m pytest -rs tests/gpu tests/embeddings tests/executors/test_optimizers.py

# Long searches, random input, the structure and the documents' code, of which versions change nothing: make test has them.
test-newest test-lowest: LONG = test_architecture test_fuzz test_readme embeddings/test_bijection embeddings/test_duplicates executors/test_oracle ingestion/test_order planner/test_dedup planner/test_index_dedup planner/test_loads planner/test_memory planner/test_step planner/test_vertices planner/test_caching planner/test_compress_whole planner/test_compression planner/test_optimal planner/test_reductions planner/whole_model/test_cases planner/whole_model/test_joint planner/whole_model/test_master
setup-newest: CONSTRAINT =
setup-lowest: CONSTRAINT = --constraint .venv-lowest/lowest.txt
test-newest test-lowest: test-%: setup-%
	.venv-$*/bin/python -m pytest -n auto --dist worksteal $(LONG:%=--ignore tests/%.py)

setup-newest setup-lowest: setup-%: .venv-%/bin/python
	$(if $(CONSTRAINT),$< .ci/lowest_versions.py test > .venv-lowest/lowest.txt)
	$< $(INSTALL) $(CONSTRAINT) --upgrade --editable ".[test]"

$(PLANNING:%=%/bin/python):
	$(PYTHON) -m venv $(@:%/bin/python=%)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "the site is in build/site; look at it with: python3 -m http.server --directory build/site"

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) --editable ".[docs]"
	touch $@

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.bench: $(VENV)/.ready
	$(VENV)/bin/python $(INSTALL) --editable ".[bench]"
	touch $@

bench: $(VENV)/.bench
	$(VENV)/bin/python -m benchmarks.paper_tables
	$(VENV)/bin/python -m benchmarks.solver
	$(VENV)/bin/python -m benchmarks.compression
	$(VENV)/bin/python -m benchmarks.profiling
	$(VENV)/bin/python -m benchmarks.encoding
	$(VENV)/bin/python -m benchmarks.replay
	$(VENV)/bin/python -m benchmarks.calls
	$(VENV)/bin/python -m benchmarks.distinct_rows
	$(VENV)/bin/python -m benchmarks.memory
	$(VENV)/bin/python -m benchmarks.step_gain

bench-torchrec: setup
	$(VENV)/bin/python -m benchmarks.torchrec_planner
	$(VENV)/bin/python -m benchmarks.whole_model
	$(VENV)/bin/python -m benchmarks.torchrec_row_wise
	$(VENV)/bin/python -m benchmarks.table_groups
	$(VENV)/bin/python -m benchmarks.translation
	$(VENV)/bin/python -m benchmarks.step_memory
	$(VENV)/bin/python -m benchmarks.lookups
	$(if $(CHECKOUT),$(VENV)/bin/python -m benchmarks.torchrec_sharding_tests "$(CHECKOUT)")
	$(if $(CHECKOUT),$(VENV)/bin/python -m benchmarks.torchrec_planner_tests "$(CHECKOUT)")
	$(if $(EASYREC),$(VENV)/bin/python -m benchmarks.torcheasyrec_plan "$(EASYREC)")
	$(if $(CHECKOUT),$(VENV)/bin/python $(INSTALL) pandas && $(VENV)/bin/python -m benchmarks.bert4rec "$(CHECKOUT)")

bench-recd: $(VENV)/.bench
	$(VENV)/bin/python -m benchmarks.recd

bench-ingest: $(VENV)/.bench
	$(VENV)/bin/python $(INSTALL) "pandas>=2.2,<4"
	$(VENV)/bin/python -m benchmarks.ingestion $(if $(CLICKS),--clicks "$(CLICKS)")

bench-lookahead: setup
	$(VENV)/bin/python -m benchmarks.lookahead $(if $(CLICKS),--clicks "$(CLICKS)") $(if $(LOOKUPS),--lookups "$(LOOKUPS)")

bench-tt: setup
	$(VENV)/bin/python -m benchmarks.tensor_train
	$(VENV)/bin/python -m benchmarks.tensor_train_model
	$(VENV)/bin/python -m benchmarks.tensor_train_order $(if $(CLICKS),--clicks "$(CLICKS)")
	$(if $(CLICKS),$(VENV)/bin/python -m benchmarks.tensor_train_accuracy "$(CLICKS)")

bench-gpu: setup
	@command -v nvidia-smi >/dev/null || { echo "there is no GPU here: nothing to measure"; exit 1; }
	$(VENV)/bin/python -m benchmarks.gpu
	$(VENV)/bin/python -m benchmarks.torchrec_row_wise --device cuda
	$(VENV)/bin/python -m benchmarks.tensor_train_gpu
	$(VENV)/bin/python -m benchmarks.lookahead.uvm_caching

bench-cluster: setup
	$(VENV)/bin/python -m benchmarks.cluster
	$(VENV)/bin/python -m benchmarks.cluster.whole_models
	$(VENV)/bin/python -m benchmarks.cluster.lookahead
	$(VENV)/bin/python -m benchmarks.cluster.served
	$(VENV)/bin/python -m benchmarks.cluster.served --mbit 100 --exponents 0.5 --tt-rank 16

clean:
	rm -rf .venv .venv-* demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
