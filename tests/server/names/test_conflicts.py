"""The places of names: a restart has its place at once, a second process is refused beside a living one."""

import pytest

from atoll.server.names.conflicts import LASTS_S, VACANCY_S, Claimant, NameConflicts

NORTH = Claimant("10.0.0.1:4001", "p1", "f1")
RESTARTED = Claimant("10.0.0.1:4002", "p2", "f1")
ELSEWHERE = Claimant("10.0.0.2:5001", "p3", "f3")
OLD_1, OLD_2 = Claimant("10.0.0.1:4003"), Claimant("10.0.0.2:5003")


class Door:
    """The coordinator's side of one name: a holder that is heard all the time, unless it is silent."""

    def __init__(self):
        self.names = NameConflicts("client", "stop one of the two")
        self.now, self.holder, self.heard_at, self.is_silent, self.lines = 1000.0, None, 0.0, False, []

    def knocks(self, claimant, after=10.0):
        """Whether a process has the place, some seconds later."""
        self.now += after
        heard_at = self.heard_at if self.is_silent else self.now - 1
        entry = self.names.enter("north", claimant, self.holder, heard_at=heard_at, now=self.now)
        self.lines += [entry.line] if entry.line else []
        if not entry.refusal:
            self.holder, self.heard_at, self.is_silent = claimant, self.now, False
        return not entry.refusal

    def leaves(self, *, for_good=False):
        self.holder = None
        self.names.leave("north", self.now, for_good=for_good)

    @property
    def conflict(self):
        found = self.names.current(self.now)
        return found[0] if found else None


def test_a_restart_has_its_place_at_once_and_is_no_conflict():
    door = Door()
    assert door.knocks(NORTH)
    door.is_silent = True  # kill -9: the stream is half open
    assert door.knocks(RESTARTED, after=0.1)
    assert not door.lines
    assert door.conflict is None


def test_any_number_of_restarts_and_reconnects_is_no_conflict():
    door = Door()
    for number in range(50):
        process = Claimant(f"10.0.0.1:{number}", f"p{number}", "f1")
        assert door.knocks(process)
        assert door.knocks(process)
    assert not door.lines
    assert door.conflict is None


def test_a_second_directory_is_refused_while_the_holder_lives_and_both_are_named():
    door = Door()
    assert door.knocks(NORTH)
    assert not door.knocks(ELSEWHERE)
    assert door.conflict is None, "the holder may be half dead: it was not heard since"
    assert not door.knocks(ELSEWHERE)
    assert (door.conflict.keeper, door.conflict.other, door.conflict.count) == (NORTH.address, ELSEWHERE.address, 1)
    assert NORTH.address in door.lines[0]
    assert ELSEWHERE.address in door.lines[0]
    assert "stop one of the two" in door.lines[0]
    assert not door.knocks(Claimant("10.0.0.2:6", "p9", "f3")), "nor its restart"
    assert door.conflict.count == 2


def test_a_site_that_moves_to_another_directory_waits_for_the_lease_and_is_no_conflict():
    door = Door()
    assert door.knocks(NORTH)
    door.is_silent = True
    assert not door.knocks(ELSEWHERE)
    assert not door.knocks(ELSEWHERE)
    door.leaves(for_good=True)  # its lease has run out
    assert door.knocks(ELSEWHERE)
    assert not door.lines
    assert door.conflict is None


def test_of_two_copies_of_one_directory_the_newer_process_keeps_the_place():
    door = Door()
    copy = Claimant("10.0.0.2:5001", "p2", "f1")
    assert door.knocks(NORTH)
    assert door.knocks(copy), "it looks like a restart"
    for _ in range(20):
        assert not door.knocks(NORTH)
    assert (door.conflict.keeper, door.conflict.other, door.conflict.count) == (copy.address, NORTH.address, 20)


def test_the_other_one_has_the_place_when_the_holder_says_goodbye():
    door = Door()
    door.knocks(NORTH)
    door.knocks(ELSEWHERE)
    door.knocks(ELSEWHERE)
    door.leaves(for_good=True)
    assert door.conflict is None
    assert door.knocks(ELSEWHERE)


def test_a_holder_whose_connection_breaks_finds_its_place_free():
    door = Door()
    door.knocks(NORTH)
    door.knocks(ELSEWHERE)
    door.leaves()
    assert not door.knocks(ELSEWHERE, after=VACANCY_S - 1)
    assert door.knocks(NORTH, after=0.5)
    door.leaves()
    assert door.knocks(ELSEWHERE, after=VACANCY_S)


def test_the_log_has_a_line_in_intervals_that_grow_and_a_conflict_ends_by_itself():
    door = Door()
    door.knocks(NORTH)
    for _ in range(24 * 60):  # a day
        door.knocks(ELSEWHERE, after=60.0)
    doublings = 6  # of 60 s to an hour
    assert 24 <= len(door.lines) <= 24 + doublings + 1
    assert "1439 times" in door.conflict.sentence
    door.now += LASTS_S
    assert door.conflict is None


def test_older_programs_have_the_place_as_ever_and_are_reported_when_they_alternate():
    door = Door()
    assert door.knocks(OLD_1)
    assert door.knocks(OLD_2)
    assert door.knocks(OLD_1)
    assert not door.lines
    assert door.knocks(OLD_2)
    assert "may be used twice" in door.lines[0]
    assert "3 times in a row" in door.lines[0]
    assert OLD_1.address in door.lines[0]
    assert OLD_2.address in door.lines[0]


@pytest.mark.parametrize("others", [(OLD_1, NORTH), (NORTH, OLD_1)], ids=["older first", "older last"])
def test_an_older_and_a_newer_program_both_have_the_place(others):
    door = Door()
    assert all(door.knocks(claimant) for claimant in others)


def test_older_programs_that_reconnect_now_and_then_are_not_reported():
    door = Door()
    for _ in range(100):
        assert door.knocks(OLD_1, after=LASTS_S)
    assert not door.lines


def test_what_is_remembered_is_bounded():
    door = Door()
    door.knocks(NORTH)
    for number in range(1000):
        door.knocks(Claimant(f"h:{number}", f"p{number}", f"f{number}"), after=0.1)
        door.names.enter(f"n{number}", ELSEWHERE, NORTH, heard_at=0.0, now=0.0)
    assert len(door.names._place("north").rivals) <= 16
