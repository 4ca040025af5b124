import json

import pytest

from atoll.server.names.conflicts import LASTS_S, Claimant
from atoll.server.names.places import CLIENT, FILE, RANK, Places, conflicts_shown

HERE, ELSEWHERE = Claimant("10.0.0.1:1", "p1", "f1"), Claimant("10.0.0.2:2", "p2", "f2")


class Site:
    """The places of a coordinator at an instant that a test moves on."""

    def __init__(self, folder):
        self.folder, self.now = folder, 1000.0
        self.places = Places(folder, lambda: self.now)

    def collide(self, kind=CLIENT, name="north"):
        for _ in range(2):
            self.now += 10
            refusal = self.places.enter(kind, name, ELSEWHERE, HERE, heard_at=self.now - 1)
        return refusal


def test_a_conflict_is_in_the_log_and_in_the_file_while_it_lasts(tmp_path, caplog):
    it = Site(tmp_path)
    assert "10.0.0.1:1 has the place of client north" in it.collide()
    (row,) = conflicts_shown(tmp_path, it.now)
    assert (row["kind"], row["name"], row["keeper"], row["other"]) == (CLIENT, "north", HERE.address, ELSEWHERE.address)
    assert row["sentence"] in caplog.text
    assert "atoll client invite NAME" in row["sentence"]
    assert it.places.sentence(CLIENT, "north") == row["sentence"]
    assert it.places.sentence(RANK, "north") == ""
    assert conflicts_shown(tmp_path, it.now + LASTS_S) == []
    it.places.leave(CLIENT, "north", for_good=True)
    assert conflicts_shown(tmp_path, it.now) == []


def test_the_log_repeats_no_line_while_its_interval_lasts(tmp_path, caplog):
    it = Site(tmp_path)
    for _ in range(3):
        it.collide()
    assert caplog.text.count("is used twice") == 1
    it.collide(RANK, "0")
    assert "rank 0 is used twice" in caplog.text


def test_a_new_coordinator_shows_no_conflict_of_the_last_one(tmp_path):
    Site(tmp_path).collide()
    Site(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_full_disk_costs_the_display_alone(tmp_path, caplog):
    it = Site(tmp_path / "absent")
    assert it.collide()
    assert "cannot be shown" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '[{"kind": 1}]', '[{"until": "x"}]', "\udcff"])
def test_a_damaged_file_shows_no_conflict(tmp_path, content):
    (tmp_path / FILE).write_bytes(content.encode(errors="surrogateescape"))
    assert conflicts_shown(tmp_path, 0.0) == []
    (tmp_path / FILE).write_text(json.dumps([]))
    assert conflicts_shown(tmp_path, 0.0) == []
