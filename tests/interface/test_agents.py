"""A site's agent through the Python interface: read beside the running agent, and nothing is written."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from atoll.client.policy.database import SCHEMA
from atoll.client.policy.history import PolicyHistory
from atoll.interface.agents import Agent
from atoll.interface.errors import AtollError
from atoll.interface.places import place
from tests.client.policy.budgets.test_gate import Site, private
from tests.client.policy.test_gate import spooled, version


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "atoll-agent-north"
    folder.mkdir()
    site = Site(folder, epsilon=1.7)
    assert site.gate.admit(private(1), version()).is_allowed
    return site


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder, without SQLite's index of its log, which readers share."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".db-shm"}


@pytest.mark.parametrize("is_running", [True, False])
def test_a_site_is_read_and_nothing_is_written(site: Site, is_running: bool) -> None:
    spooled(site.folder)
    if not is_running:
        site.gate.close()
    before = files(site.folder)
    found = place(str(site.folder))
    assert isinstance(found, Agent)
    assert [(row["run"], row["task"], row["standing"]) for row in found.runs] == [("r-1", "t", "undecided")]
    assert [(row["run"], row["round"], row["num_bytes"]) for row in found.spool] == [("r-1", 1, 40)]
    assert found.budgets(site.path)["budgets"][0]["charges"] == 1
    assert found.budgets()["budgets"][0]["data"] == "mri-2026"
    assert [*found.peers] == []
    assert found.decisions(count=1)["events"][0]["action"] == "train.allowed"
    assert found.decisions_verdict()["num_faults"] == 0
    (row,) = found.alerts
    assert "no agent runs" in row["sentence"]
    after = files(site.folder)
    assert {name: data for name, data in after.items() if data or name in before} == before
    site.gate.close()


def test_an_update_that_is_being_written_is_left_alone(site: Site) -> None:
    entry = spooled(site.folder)
    torn = entry.path.with_name("r-1.2.update")
    torn.write_bytes(entry.path.read_bytes()[:-9])
    (site.folder / "spool" / "r-1.3.parts").mkdir()
    assert len(Agent(site.folder).spool) == 1
    assert torn.exists()
    site.gate.close()


def test_an_older_and_a_damaged_record_and_another_folder_are_refused_with_a_way_out(
    site: Site, tmp_path: Path
) -> None:
    site.gate.close()
    path = site.folder / "policy.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 5")
    with pytest.raises(AtollError, match=f"has schema 5, and this Atoll reads {SCHEMA}: its agent, or `atoll site"):
        _ = Agent(site.folder).runs
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (5,), "it was only read"
        database.execute(f"PRAGMA user_version = {SCHEMA}")
    path.write_bytes(b"no database" * 100)
    with pytest.raises(AtollError, match=r"policy\.db cannot be used: file is not a database"):
        _ = Agent(site.folder).runs
    with pytest.raises(AtollError, match="is not an agent's state directory"):
        Agent(tmp_path)


def test_the_conditions_of_a_running_agent_are_those_that_it_reports(tmp_path: Path) -> None:
    PolicyHistory(tmp_path).close()
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    assert [*Agent(tmp_path).alerts] == []
    told = {"clock north": {"at": 1.0, "sentence": "the clock is wrong", "lasts": True, "is_event": False}}
    book = {"told": told, "begun": {}, "due": {}, "facts": {}, "lasting": ["the clock is wrong"]}
    (tmp_path / "notices.json").write_text(json.dumps(book))
    (row,) = Agent(tmp_path).alerts
    assert (row["condition"], row["subject"], row["level"]) == ("clock", "north", "warning")
    for lock in ("", "x", "999999999", "99999999999999999999"):
        (tmp_path / "lock").write_text(lock)
        assert Agent(tmp_path).alerts[0]["condition"] == "AtollAgentDisconnected"
