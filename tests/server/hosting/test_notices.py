"""The coordinator's look at what a person has to know: who is missed, which versions are new, what lasts."""

import asyncio
import logging
from types import SimpleNamespace

from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.notices.book import Book
from atoll.protocol.notices.notice import Condition
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.vocabulary import LossReason, RunState
from atoll.server.hosting import notices
from atoll.server.hosting.notices import CoordinatorWatch
from atoll.server.identity.register import Member, Standing

NOW = 1_800_000_000.0


class World:
    """A coordinator as a watch sees it."""

    def __init__(self, tmp_path, *, has_members=True, **config):
        self.hub, self.members, self.runs = {}, [], {}
        attendance = SimpleNamespace(hub=Hub(self.hub), listeners=[])
        self.coordinator = SimpleNamespace(
            state=SimpleNamespace(path=tmp_path),
            attendance=attendance,
            runs=self.runs,
            clocks=SimpleNamespace(told={}, on_jump=[]),
            audit=SimpleNamespace(damage=""),
        )
        self.book = Book()
        members = self.of_register if has_members else None
        self.watch = CoordinatorWatch(self.coordinator, NotifyConfig(disk=0, **config), members)

    async def of_register(self):
        return self.members

    def look(self, now=NOW):
        found = asyncio.run(self.watch.look(self.book, now))
        self.book.look(found, now)
        return {(each.condition, each.subject) for each in found}

    def enrol(self, name, standing=Standing.MEMBER, role=Role.CLIENT):
        self.members.append(Member(Identity(role, name), standing, NOW, NOW + 30 * 86400))
        self.watch._next_slow = 0.0

    def connect(self, name, software="atoll 1"):
        self.hub[name] = SimpleNamespace(client_id=name, software=software)
        self.watch.joined(self.hub[name])

    def leave(self, name, why):
        del self.hub[name]
        self.watch.lost(name, why)

    def open(self, *clients):
        members = {name: SimpleNamespace(has_declined=False) for name in clients}
        membership = SimpleNamespace(members=members)
        ledger = SimpleNamespace(is_open=True, state=RunState.RUNNING, membership=membership)
        self.runs["r-1"] = SimpleNamespace(machine=SimpleNamespace(ledger=ledger))


class Hub(SimpleNamespace):
    def __init__(self, connections):
        super().__init__(connections=connections)

    def __contains__(self, name):
        return name in self.connections

    def __iter__(self):
        return iter(self.connections.values())

    def __len__(self):
        return len(self.connections)


def away(*names):
    return {(Condition.AWAY, name) for name in names}


def test_members_that_are_not_connected_are_missed_and_others_are_not(tmp_path):
    it = World(tmp_path)
    it.enrol("north")
    it.enrol("south")
    it.enrol("east", Standing.INVITED)
    it.enrol("west", Standing.REVOKED)
    it.enrol("anna", role=Role.OPERATOR)
    it.enrol("by-hand", Standing.BY_HAND)
    it.connect("south")
    assert it.look() == away("north", "by-hand")


def test_without_a_register_the_sites_of_open_runs_are_missed(tmp_path):
    it = World(tmp_path, has_members=False)
    it.open("north", "south")
    it.connect("south")
    assert it.look() == away("north")


def test_a_revoked_site_of_an_open_run_is_not_missed(tmp_path):
    it = World(tmp_path)
    it.open("north", "south")
    it.enrol("north", Standing.REVOKED)
    assert it.look() == away("south")


def test_an_agent_that_has_said_goodbye_is_missed_while_a_run_is_open_alone(tmp_path):
    it = World(tmp_path)
    it.enrol("north")
    it.enrol("south")
    for name in ("north", "south"):
        it.connect(name)
    it.leave("north", LossReason.LEFT)
    it.leave("south", LossReason.LEASE_EXPIRED)
    assert it.look() == away("south")
    after = World(tmp_path)  # a restart, with the book of before
    after.book, after.members = it.book, it.members
    assert after.look() == away("south")
    after.open()
    assert after.look() == away("north", "south")
    after.runs.clear()
    after.connect("north")
    after.look()
    after.leave("north", LossReason.LEASE_EXPIRED)
    assert after.look() == away("north", "south")


def test_the_absence_of_a_site_counts_from_when_it_was_first_missed_also_after_a_restart(tmp_path):
    it = World(tmp_path, away=600)
    it.enrol("north")
    it.look(NOW)
    assert not it.book.ready(NOW + 599)
    it.look(NOW + 600)
    [[due]] = it.book.ready(NOW + 600)
    assert "site north is away since 2027-01-15 08:00:00 UTC" in due.notice.sentence


def test_another_version_of_a_site_is_an_event_and_the_first_one_is_none(tmp_path):
    it = World(tmp_path)
    for software in ("atoll 1", "atoll 1", "atoll 2"):
        it.connect("north", software)
        it.look()
    [event] = it.watch.notices._events
    assert (event.condition, event.subject) == (Condition.VERSION, "north")
    assert "atoll 2 now, atoll 1 before" in event.sentence


def test_a_jump_of_the_clock_is_an_event(tmp_path):
    it = World(tmp_path)
    [listener] = it.coordinator.clocks.on_jump
    listener(-3600.0)
    [event] = it.watch.notices._events
    assert event.condition is Condition.CLOCK
    assert "was set back by 1 h 0 min" in event.sentence


def test_clocks_that_differ_a_broken_chain_and_a_low_disk_last(tmp_path):
    it = World(tmp_path)
    it.watch._config = NotifyConfig(disk=2**59)
    it.coordinator.clocks.told["journal"] = "the journal's clock shows ..."
    it.coordinator.audit.damage = "audit-0.jsonl was changed"
    assert it.look() == {
        (Condition.CLOCK, "journal"),
        (Condition.AUDIT, f"{tmp_path}/audit"),
        (Condition.DISK, str(tmp_path)),
    }


def test_a_register_that_does_not_answer_leaves_what_was_known(tmp_path, caplog):
    it = World(tmp_path)
    it.enrol("north")
    assert it.look() == away("north")

    async def gone():
        raise OSError("the database is away")

    it.watch._members, it.watch._next_slow = gone, 0.0
    with caplog.at_level(logging.WARNING):
        assert it.look() == away("north")


def test_of_many_devices_none_is_told_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(notices, "SITES_MAX", 3)
    it = World(tmp_path)
    for name in "abc":
        it.enrol(name)
    assert it.look() == away("a", "b", "c")
    it.enrol("d")
    assert it.look() == set()


def test_a_path_with_blanks_is_quoted_in_the_commands(tmp_path):
    folder = tmp_path / "a state"
    folder.mkdir()
    it = World(folder)
    it.enrol("north")
    it.look()
    assert notices.shlex.quote(str(folder)) != str(folder)
    [sentence] = [each.sentence for each in asyncio.run(it.watch.look(it.book, NOW))]
    assert f"--state '{folder}'" in sentence
