# Every target works as the only command on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

PEERS := .venv-peers/.installed
BENCHMARKS := crash_matrix round_latency resume_transfer fold fold_cuda out_of_core robust codecs step_overhead bubble collectives mfu scale simulation audit_log data_plane round_vs_flower hostile rotation

.PHONY: setup peers demo test test-parallel test-cuda check format proto docs bench soak fuzz papers mutants clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Atoll into .venv (once; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

peers: $(PEERS) # what some benchmarks measure us against, in an environment of its own

$(PEERS): benchmarks/peers.txt
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@touch $@

demo: setup
	@$(BIN)/python -m examples.demo $(DEMO)

test: setup # of two processes, one that crashes is not started again: its file would never end
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --max-worker-restart=0

test-parallel: setup # every strategy at every rank count, as a table, then the digits under each; about ten minutes
	$(BIN)/python -m tests.parallel.engine.cases
	$(BIN)/python -m tests.parallel.planner.dry_runs 50
	$(BIN)/python -m tests.parallel.trainer.everywhere

test-cuda: setup # what needs a GPU
	$(BIN)/python -m pytest -q tests/aggregation/fold/test_device.py tests/parallel/engine/test_cuda.py tests/parallel/planner/test_cuda.py tests/simulations/engines/test_cuda.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup
	$(BIN)/python -m tests.protocol.generate

docs: setup
	$(BIN)/python -m atoll.cli.docs

bench: setup
	@for name in $(or $(NAME),$(BENCHMARKS)); do $(BIN)/python -m benchmarks.$$name || exit 1; done

soak: setup
	$(BIN)/python -m atoll.simulations.histories --seeds 20000

papers: setup # the papers' tables in docs/papers.md; hours, of which MNIST (ATOLL_DATA) takes most
	$(BIN)/python -m atoll.simulations.experiments.tables.papers

fuzz: setup # ten million mutated inputs for each parser: about an hour on two cores; FUZZ="--seed 7 --inputs 100000"
	$(BIN)/python -m tests.fuzz $(FUZZ)

mutants: setup
	$(BIN)/python -m tests.mutants

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis mutants demo-run
