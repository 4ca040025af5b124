"""Clients that send their updates in parts, as processes, beside one that sends it whole: always the same bits."""

import signal
from pathlib import Path

import pytest

from atoll.operations import admin
from atoll.protocol.vocabulary import RunState
from atoll.server.journal.holder import running_coordinator
from benchmarks.dividing import VARIABLE
from tests.federation.processes import federation
from tests.waiting import BOUND_S

TASK = str(Path(__file__).with_name("parted_task.py")) + ":task"
SITES = {"a": "", "b": "rows:4", "c": "grid:6"}
RUNS = {
    "plain": "rounds = 2",
    "bf16": 'rounds = 2\naggregation.codec = "bf16"',
    "fp16": 'rounds = 1\naggregation.codec = "fp16"\noptimizer.name = "fedadam"',
    "krum": 'rounds = 1\naggregation = {rule = "multi_krum", malicious = 0, num_selected = 2}',
    "median": 'rounds = 1\naggregation = {rule = "median"}',
}


def digests(it, run_id):
    return [row.digest for row in it.history().versions(run_id)]


def is_finished(it, run_id):
    try:
        return it.history().run(run_id).state is RunState.FINISHED
    except (LookupError, OSError):
        return False


def models_of(folder, num_ranks, sites):
    """The digests of all versions of every run, with clients that divide their updates as `sites` says."""
    folder.mkdir()
    with federation(folder, task=TASK) as it:
        ranked = {"coordinator__aggregators": num_ranks} if num_ranks else {}
        it.coordinator(name="trouble", rounds=1, round__cohort_size=3, stay=True, **ranked)
        for site, divided in sites.items():
            it.agent(site, exit_when_done=False, environment={VARIABLE: divided} if divided else {})
        it.wait_for(lambda: running_coordinator(it.state), every=0.1)
        for name, settings in RUNS.items():
            admin.start(it.state, f'task = "{TASK}"\nname = "{name}"\nround.cohort_size = 3\n{settings}')
        it.wait_for(lambda: all(is_finished(it, f"{name}-1") for name in (*RUNS, "trouble")), every=0.2)
        for name in RUNS:
            [*_, record] = it.history().rounds(f"{name}-1")
            assert sorted(record.clients) == sorted(sites), "one client, one update in every record"
            assert record.num_reported == len(sites)
        assert not [path for path in folder.rglob("*.parts") if path.is_dir()], "spools are empty"
        for name in RUNS:
            assert not list(folder.glob(f"state/**/runs/{name}-1/incoming/*"))
        assert "resend" not in it.log("coordinator")
        return {name: digests(it, f"{name}-1") for name in RUNS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return models_of(tmp_path_factory.mktemp("whole") / "it", 0, dict.fromkeys(SITES, ""))


LONG = pytest.mark.long


@pytest.mark.parametrize("num_ranks", [0, pytest.param(1, marks=LONG), 2, pytest.param(4, marks=LONG)])
def test_parts_make_the_model_that_whole_updates_make(tmp_path, whole, num_ranks):
    assert models_of(tmp_path / "it", num_ranks, SITES) == whole


@pytest.mark.parametrize(
    "step",
    ["agent.part_written:3", *(pytest.param(step, marks=pytest.mark.long) for step in ("agent.root_spooled",))],
)
def test_an_agent_that_dies_while_it_spools_its_parts_sends_one_update(tmp_path, step):
    """A folder without its root is no update: it is trained again; with it, it is sent."""
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(rounds=2, round__cohort_size=2)
        it.agent("a")
        divided = {VARIABLE: "stripes:4"}
        it.agent("b", environment=divided | {"ATOLL_CRASH_AT": step})
        assert it.running["b"].wait(BOUND_S) == -signal.SIGKILL
        [left] = (tmp_path / "b" / "spool").iterdir()
        assert (left / "root.json").exists() == step.startswith("agent.root_spooled")
        it.agent("b", environment=divided)
        assert it.wait_for_end() == 0
        assert [record.num_reported for record in it.rounds()] == [2, 2]
