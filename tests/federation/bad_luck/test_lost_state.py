"""Real processes whose state is lost in part: the file of an accepted update, or all but a backup of a coordinator with
its journal in a PostgreSQL server, which was made while its rounds went on."""

import shutil
import subprocess

import pytest

from atoll.server.required.losses import losses_in
from tests.federation.processes import ATOLL, federation

LOSING = {"rounds": 2, "round.cohort_size": 2, "round.retry": 0, "round.retry_wait": 0}
LASTING = {"rounds": 16, "pause": 0.2, "round.cohort_size": 2, "coordinator.keep_versions": 1}


def test_a_start_without_an_accepted_update_is_refused_and_with_accept_losses_the_run_ends_finished(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**LOSING)
        it.agent("a")
        it.agent("b", environment={"TROUBLE_SLEEP": "8"}.items())
        it.wait_for(lambda: (record := it.open_round()) is not None and record.num_reported == 1)
        it.kill("coordinator")
        shutil.copytree(it.state, tmp_path / "copy", ignore=shutil.ignore_patterns("lock", "alive"))
        [file] = it.state.glob("runs/trouble-1/updates/*.bin")
        file.unlink()
        assert it.coordinator(**LOSING).wait(60) == 2
        said = [line.partition(" error: ")[2] for line in it.log("coordinator").splitlines()[-2:]]
        assert said[0].startswith(f"run trouble-1: {file} is missing: it is the accepted update of a in round 1")
        assert "start once with --accept-losses" in said[1]
        checked = subprocess.run(
            [ATOLL, "coordinator", "--state", it.state, "--check"], capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr.splitlines()[-2:]) == (2, [f"atoll: {line}" for line in said])
        whole = subprocess.run([ATOLL, "coordinator", "--state", tmp_path / "copy", "--check"], capture_output=True)
        assert whole.returncode == 0, whole.stderr
        it.coordinator(extra=("--accept-losses",), **LOSING)
        assert it.wait_for_end() == 0
        log = it.log("coordinator")
        assert f"accepted by --accept-losses: run trouble-1: {file} is missing" in log
        assert f"lost on the coordinator's disk: 1 accepted update: {file.name} is missing" in log
        assert "round 1: abandoned: files of it were lost on the coordinator's disk (files_lost)" in log
        assert "retry 1 of" not in log
        first, *others = it.rounds()
        assert (first.clients["a"].reason, first.clients["a"].used_in) == ("update_lost", None)
        assert sum(record.phase == "committed" for record in others) == 2


def atoll(*command):
    done = subprocess.run([ATOLL, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def committed(it):
    return sum(record.phase == "committed" for record in it.rounds())


def test_a_backup_of_a_running_coordinator_with_a_server_goes_on_elsewhere_to_the_end(
    tmp_path, postgres_server, schema_url
):
    pytest.importorskip("psycopg", reason="the driver is not installed: pip install -c constraints.txt -e '.[dev]'")
    with federation(tmp_path) as it:
        it.coordinator(**LASTING, coordinator__database=schema_url)
        sites = ("a", "b")
        for site in sites:
            it.agent(site)
        it.wait_for(lambda: committed(it) >= 2)
        for number in range(3):
            before = committed(it)
            atoll("backup", it.state, tmp_path / f"{number}.tar")
            it.wait_for(lambda before=before: committed(it) > before)
        assert "is whole" in atoll("backup", "verify", tmp_path / "2.tar")
        members = it.show("client", "members")
        for name in [*it.running]:
            it.kill(name)
        shutil.move(it.state, tmp_path / "lost")
        new = postgres_server.url(postgres_server.new_schema())
        assert "revoke" in atoll("restore", tmp_path / "2.tar", it.state, "--database", new)
        assert not (it.state / "state.db").exists()
        assert losses_in(it.state) == []
        assert it.show("client", "members") == members
        for site in sites:  # an agent takes no older round of a run that it knows, until its operator says so
            atoll("site", "accept-rollback", "trouble-1", "--state", tmp_path / site)
        it.coordinator(**LASTING)
        for site in sites:
            it.agent(site)
        assert it.wait_for_end() == 0
        assert it.history().run("trouble-1").state == "finished"
        used = [row.digest for record in it.rounds() for row in record.clients.values() if row.used_in is not None]
        assert len(used) == len(set(used)) == 2 * LASTING["rounds"]
        assert "sound: " in atoll("audit", "verify", "--state", it.state)
