"""A mesh of which a rank dies at every place of a round, a rank hangs, or the launcher dies: only time is lost."""

import os
import signal
from contextlib import contextmanager

import pytest

from atoll.parallel.mesh_client.crash_points import VARIABLE
from benchmarks.crew_task import SITES
from tests.federation.processes import federation
from tests.parts.test_federation import digests
from tests.process_table import descendants, is_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

TASK, ROUNDS, EVERY, HANG_S = "benchmarks.crew_task:task", 3, "3 steps", 15.0
DEATHS = [
    "crew.mid_step:2 1",  # of the first three steps, before the first checkpoint
    "crew.mid_step:3 0 stop",
    "crew.saved:1 1 stop",  # from the start again: its checkpoint is not complete
    "crew.filling 0",
    "crew.loading 1",
    "crew.starting 1",
    "crew.stepped:4 0",
    "crew.filled 1",
    "crew.saving:2 1",
    "crew.saved:1 0",
    "crew.mid_step:3 0",
    "crew.starting 0",
    "crew.trained 1",
    "crew.part_written 0",
    "crew.part_written 1",
    "crew.answering 1",
    "crew.answering 0",
    "crew.answering 1 stop",
    "crew.filled 0",
    "crew.answering 0 stop",
    "crew.loading 1 stop",
    "crew.mid_step:2 1",  # of the next round
]


@contextmanager
def a_mesh_and_two_plain(folder, **environment):
    """A federation whose site a is a mesh of two ranks."""
    folder.mkdir(exist_ok=True)
    with federation(folder, task=TASK) as it:
        it.coordinator(rounds=ROUNDS, round__cohort_size=3, round__deadline=1200, coordinator__lease=300)
        crew = {"mesh": "dp_shard=2", "checkpoint_every": EVERY, "max_restarts": 100, "collective_timeout": HANG_S}
        it.agent("a", environment=environment, **{f"crew.{name}": value for name, value in crew.items()})
        for site in SITES[1:]:
            it.agent(site, threads=1)
        yield it


def updates(it):
    """The digest of each client's update in each round: of its bytes, its losses and its number of examples."""
    return [[(site, client.digest) for site, client in sorted(record.clients.items())] for record in it.rounds()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with a_mesh_and_two_plain(tmp_path_factory.mktemp("undisturbed") / "it") as it:
        assert it.wait_for_end() == 0
        return digests(it, "trouble-1"), updates(it)


def launcher_of(it):
    """The process of torch elastic's launcher."""
    for process in descendants(it.running["a"].pid):
        with open(f"/proc/{process}/cmdline") as file:
            if "\0atoll.parallel.launch\0" in file.read():
                return process
    return None


def test_no_death_of_a_rank_or_of_its_launcher_changes_the_model(tmp_path, undisturbed):
    plan, done = tmp_path / "plan", tmp_path / "plan.done"
    with a_mesh_and_two_plain(tmp_path / "it", **{VARIABLE: str(plan)}) as it:
        for death in DEATHS:
            plan.with_suffix(".next").write_text(death)
            os.replace(plan.with_suffix(".next"), plan)
            it.wait_for(done.exists, timeout=600)
            done.unlink()
        launcher = launcher_of(it)
        os.kill(launcher, signal.SIGKILL)
        it.wait_for(lambda: not is_running(launcher))
        for name in ("coordinator", *SITES):
            assert it.wait_for_end(name, timeout=600) == 0
        met = [death for death in DEATHS if not death.startswith("crew.starting")]  # that is no loss: they are not here
        assert it.log("a").count("the ranks start again") >= len(met)
        for record in it.rounds():
            assert sorted(record.clients) == SITES
            assert record.num_reported == 3, "one client, one update in every record"
        assert (digests(it, "trouble-1"), updates(it)) == undisturbed
