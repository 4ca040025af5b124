"""Real processes: a coordinator with its journal in a PostgreSQL server is backed up while its rounds go on, is lost,
and goes on in another schema to the end, with its members, keys and audit log."""

import shutil
import subprocess

import pytest

from atoll.server.required.losses import losses_in
from tests.federation.processes import ATOLL, federation

pytest.importorskip("psycopg", reason="the driver is not installed: pip install -c constraints.txt -e '.[dev]'")

SETTINGS = {"rounds": 16, "pause": 0.2, "round.cohort_size": 2, "coordinator.keep_versions": 1}


def atoll(*command):
    done = subprocess.run([ATOLL, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def committed(it):
    return sum(record.phase == "committed" for record in it.rounds())


def test_a_backup_of_a_running_coordinator_with_a_server_goes_on_elsewhere_to_the_end(
    tmp_path, postgres_server, schema_url
):
    with federation(tmp_path) as it:
        it.coordinator(**SETTINGS, coordinator__database=schema_url)
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
        it.coordinator(**SETTINGS)
        for site in sites:
            it.agent(site)
        assert it.wait_for_end() == 0
        assert it.history().run("trouble-1").state == "finished"
        used = [row.digest for record in it.rounds() for row in record.clients.values() if row.used_in is not None]
        assert len(used) == len(set(used)) == 2 * SETTINGS["rounds"]
        assert "sound: " in atoll("audit", "verify", "--state", it.state)
