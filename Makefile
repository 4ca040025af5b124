# Every target works as the only command on a fresh clone.
PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE # or each of the thousand processes of the tests would compile Atoll again
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := torch==2.13.0

PEERS := .venv-peers/.installed
BENCHMARKS := crash_matrix round_latency resume_transfer fold fold_cuda out_of_core robust codecs step_overhead bubble collectives mfu scale simulation batched audit_log data_plane parts round_vs_flower hostile rotation ranks import_time startup trees large_client flower_app agent_memory sizing secure_mask privacy private_utility secure_mesh scrape shared_noise

.PHONY: setup peers demo demo-large demo-private test test-fast test-long durations coverage test-parallel test-flower flower-table flower-strategy-tests browser-test test-cuda check format constraints proto docs notebooks bench bench-guard bench-views soak pages odd-tasks chaos-hour soak-live bad-week deaths fuzz papers mutants image-test alerts-test slurm-test clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Atoll into .venv (once; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

peers: $(PEERS) # what some benchmarks measure us against, in an environment of its own

$(PEERS): benchmarks/peers.txt
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@touch $@

demo-large: setup # two plain sites and a mesh of four ranks; processes are killed on the way; three minutes
	@$(BIN)/python -m examples.demo_large $(DEMO)

demo-private: setup # five pinned sites, secure sums, noise in each step; three deaths and two lies on the way; three minutes
	@$(BIN)/python -m examples.demo_private $(DEMO)

demo: setup
	@$(BIN)/python -m examples.demo $(DEMO)

# Six workers on two cores, as many tests wait for processes; the longest files first (tests/durations.json).
PYTEST_ALL := $(BIN)/python -m pytest -q -p tests.workers --workers 6 -p tests.durations

test: setup
	$(PYTEST_ALL) -m "not long" --durations=40

test-long: setup # what `make test` leaves out, or runs in turns (tests/turns.py): variants in more processes, every page; all by a real exec
	ATOLL_COLD_START=1 ATOLL_TEST_DAY=all $(PYTEST_ALL) -m long --durations=10

durations: setup # as `make test`, and refreshes tests/durations.json
	$(PYTEST_ALL) -m "not long" --durations=40 --store-durations

test-fast: setup # what needs no process, port or sleep, and no third of a second; `tests/fast.py` watches over it
	$(BIN)/python -m pytest -q -p tests.fast -m "not real and not slow and not long" -n 2 --dist worksteal

coverage: setup # all tests, with the lines of shipped code that none of them reaches in its own process
	$(BIN)/python -m pytest -q -n 4 --dist loadfile -p tests.durations --no-loadscope-reorder --cov --cov-report=term-missing

test-parallel: setup # every strategy at every rank count, as a table, then the digits under each; about ten minutes
	$(BIN)/python -m tests.parallel.engine.cases
	$(BIN)/python -m tests.parallel.planner.dry_runs 50
	$(BIN)/python -m tests.parallel.trainer.everywhere

pages: setup # every command of every page, also the long ones: five minutes
	$(BIN)/python -m pytest -q -n 2 tests/pages/test_sessions.py --durations=10

odd-tasks: setup # every odd task in every way to run one, as a table; about an hour
	$(BIN)/python -m tests.odd_tasks $(ODD)

OF_FLOWER := tests/flower tests/flower/exported tests/messages/strategies tests/flower/hosted/test_grid.py \
  tests/flower/hosted/test_fitting.py tests/messages/test_deaths.py tests/federation/flower/test_flower_apps.py \
  --deselect tests/messages/test_deaths.py::test_no_death_at_any_place_changes_a_digest \
  --deselect tests/federation/flower/test_flower_apps.py::test_an_app_runs_in_the_sites_own_environment_without_torch

# Each version lies in a folder of its own before the installed one on the path, above the same other packages.
test-flower: setup # native and hosted Flower apps with every minor version of flwr that the extra allows
	@for version in 1.38.0 1.39.0 1.40.0 1.41.0 1.42.0; do echo "flwr $$version"; folder="$(CURDIR)/.flower/$$version"; \
	  test -d "$$folder/flwr" || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$$folder" "flwr==$$version" || exit 1; \
	  PYTHONPATH="$$folder" $(BIN)/python -m pytest -q -n 2 --show-capture=no $(OF_FLOWER) || exit 1; done

flower-table: setup # Flower's strategies, wrappers and workflows over our grid, with real agents, as a table; two minutes
	@$(BIN)/python -m tests.messages.strategies

# Flower's wheel has no tests, and nothing is fetched: FLOWER names a clone, at the tag of the installed flwr.
flower-strategy-tests: setup # Flower's own tests of its strategies, each aggregation played again by a native run
	@$(BIN)/python -m tests.flower.flowers_tests $(FLOWER)

# The packages lie in a folder of their own: nothing of Atoll needs them, and nothing but this target.
browser-test: setup # every page in Debian's Chromium, live change in ten tabs; some minutes; PICTURES=docs/pictures
	@test -d .browser/playwright || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target .browser playwright==1.65.2 axe-playwright-python==0.1.8
	PYTHONPATH=.browser ATOLL_PICTURES=$(PICTURES) $(BIN)/python -m pytest -q tests/dashboard/browser $(BROWSER)

test-cuda: setup # what needs a GPU
	$(BIN)/python -m pytest -q -n 4 tests/aggregation/fold/test_device.py $$(find tests -name test_cuda.py)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The newest versions that fit together, from a temporary environment; about five minutes. Left out are the build of
# torch (+cpu) and its CUDA packages, which torch itself pins: a machine with a GPU gives the same file.
constraints:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "the versions must fit the oldest supported Python: make constraints PYTHON=python3.11" >&2; exit 1; }
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && trap 'exit 130' INT TERM && \
	$(PYTHON) -m venv "$$scratch/venv" && \
	"$$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(TORCH)" ".[dev]" && \
	"$$scratch/venv/bin/python" -m pip freeze --exclude atoll > "$$scratch/frozen" && \
	sed -n '/^#/p' constraints.txt > "$$scratch/constraints" && \
	sed -E '/^(cuda-|nvidia-|triton==)/d; s/\+.*//' "$$scratch/frozen" | LC_ALL=C sort -f >> "$$scratch/constraints" && \
	cp "$$scratch/constraints" constraints.txt && echo "constraints.txt is refreshed: now run make test, and commit"

proto: setup
	$(BIN)/python -m tests.protocol.generate

notebooks: setup # executes docs/notebooks and stores their outputs
	$(BIN)/python -m tests.pages.notebooks

docs: setup
	$(BIN)/python -m tools.docs
	$(BIN)/python -m benchmarks.plots

bench: setup
	@for name in $(or $(NAME),$(BENCHMARKS)); do $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-guard: setup # the speed of this checkout against an earlier commit, in turns: ten minutes; BASE=commit
	@$(BIN)/python -m benchmarks.guard $(if $(BASE),--base $(BASE)) $(GUARD)

bench-views: setup # each view of a run with a million members and 100,000 rounds: some minutes; VIEWS="--members 10000"
	@$(BIN)/python -m benchmarks.views $(VIEWS)

soak: setup # 20,000 seeded histories, 10,000 with secure sums, 10,000 with budgets; 10,000 schedules of secure rounds; 5,000 generated models in every plan, of which the refused are counted by reason
	$(BIN)/python -m tests.histories --seeds 20000
	$(BIN)/python -m tests.histories --faults sums --seeds 10000
	$(BIN)/python -m tests.histories --faults budgets --seeds 10000
	$(BIN)/python -m tests.server.rounds.secure_schedules --seeds 10000
	$(BIN)/python -W ignore -m tests.parallel.generated --models 5000

deaths: setup # a real coordinator dies at every entry of a ServerApp's run, about an hour; private runs, a second or two each: DEATHS="--cycles 1000"
	ATOLL_EVERY_DEATH=1 $(BIN)/python -m pytest -q -n 2 --dist load -m long tests/messages/test_coordinator_deaths.py
	$(BIN)/python -m tests.federation.private_deaths $(DEATHS)

chaos-hour: setup # real processes with an hour of bad luck; CHAOS="--minutes 10"
	$(BIN)/python -m tests.federation.bad_luck.chaos_hour $(CHAOS)

soak-live: setup # two hours of `atoll chaos` for a coordinator and twenty agents; SOAK="--minutes 10"
	$(BIN)/python -m tests.federation.bad_luck.soak_live $(SOAK)

bad-week: setup # real processes with a week of bad luck, in less than ten minutes
	$(BIN)/python -m tests.federation.bad_luck.bad_week

papers: setup # the papers' tables in docs/papers.md; hours, of which MNIST (ATOLL_DATA) takes most
	$(BIN)/python -m benchmarks.papers

image-test: setup # builds the images of deploy/Containerfile from a Debian root, and runs a federation in them; ten minutes at first
	$(BIN)/python -m pytest -q -n 0 tests/deploy/image.py

alerts-test: setup # each alert of docs/operations fires in a real federation that has its fault, and ends; five minutes
	$(BIN)/python -m pytest -q -n 0 -x tests/telemetry/live_alerts.py

slurm-test: setup # the batch scripts of deploy/slurm under a real Slurm of two nodes on loopback; five minutes
	$(BIN)/python -m pytest -q -n 0 tests/deploy/slurm.py

fuzz: setup # ten million mutated inputs for each parser: about an hour on two cores; FUZZ="--seed 7 --inputs 100000"
	$(BIN)/python -m tests.fuzz $(FUZZ)

mutants: setup
	$(BIN)/python -m tests.mutants

clean:
	rm -rf .venv .flower .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis mutants demo-run
