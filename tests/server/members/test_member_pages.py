"""Members on pages: reading restores the membership, and a snapshot writes only the changes."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from atoll.protocol.vocabulary import ClientId, RoundId, RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.codec import decode_page, encode_ledger_without_members, encode_page
from atoll.server.journal.journal import Journal
from atoll.server.journal.member_rows import MemberReader, pages_of
from atoll.server.journal.pruning import Stay
from atoll.server.journal.recovery import read_bare_base
from atoll.server.journal.rows import Batch, Snapshot
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.members.member import Member, Profile
from atoll.server.members.member_pages import CONTENTS
from atoll.server.members.membership import Membership
from atoll.server.rounds.ledger import Ledger

RUN = RunId("r")


def name(number: int) -> ClientId:
    return ClientId(f"c{number:04}")


def batch_of(ledger: Ledger, seq: int) -> Batch:
    """Return the rows that a coordinator writes at the end of a round."""
    written = ledger.membership.unwritten.take(ledger.membership.members, seq)
    body = encode_ledger_without_members(ledger)
    return Batch(
        snapshots=[Snapshot(RUN, seq, float(seq), body, written.first, written.num_members)],
        members=[*pages_of(RUN, seq, written, ledger.membership.members)],
    )


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    return StateDirectory.open(tmp_path / "state")


def rows_written(batch: Batch) -> int:
    return sum(len(decode_page(page.body, where="here")) for page in batch.members if page.page != CONTENTS)


def number_of_rows(state: StateDirectory) -> int:
    with state.database.transaction() as connection:
        bodies = connection.execute(text("SELECT body FROM members WHERE page >= 0")).scalars()
        return sum(len(decode_page(body, where="here")) for body in bodies)


def joined(ledger: Ledger, numbers: Sequence[int]) -> None:
    for number in numbers:
        ledger.membership.joined(name(number), f"s{number}", Profile(number, "x"))


def test_the_first_snapshot_has_everyone_and_the_next_one_who_changed(state: StateDirectory) -> None:
    journal, ledger = Journal(state), Ledger()
    joined(ledger, range(1200))
    first = batch_of(ledger, 1)
    ledger.membership.counted(name(7), RoundId(1))
    ledger.membership.measured(name(9), download=1.0, train=2.0, upload=3.0)
    second = batch_of(ledger, 2)
    assert (len(first.members), rows_written(first), rows_written(second)) == (3 + 1, 1200, 2)
    for batch in (first, second):
        journal.commit(batch)
    assert journal.load(RUN).ledger == ledger


def test_a_page_leaves_out_what_a_field_is_by_default() -> None:
    member = Member(Profile(5, "north"), "session", train_seconds=1.5)
    page = encode_page({name(1): member}, [name(1)])
    assert page == ('{"c0001":{"profile":{"num_examples":5,"label":"north"},"session":"session","train_seconds":1.5}}')
    assert decode_page(page, where="here") == {name(1): member}


@pytest.mark.parametrize("page", ["{", "[]", '{"a":{}}', '{"a":{"profile":{"num_examples":1.5}}}', '{"a":{"x":1}}'])
def test_what_is_no_page_is_said_to_be_none(page: str) -> None:
    with pytest.raises(StoreCorrupted, match="page 3 of entry 2: not a page of members"):
        decode_page(page, where="page 3 of entry 2")


def test_that_everyone_was_disconnected_writes_nobody_anew(state: StateDirectory) -> None:
    journal, ledger = Journal(state), Ledger()
    joined(ledger, range(50))
    journal.commit(batch_of(ledger, 1))
    ledger.membership.everyone_disconnected()
    joined(ledger, [3, 4])
    batch = batch_of(ledger, 2)
    assert rows_written(batch) == 2
    journal.commit(batch)
    found = journal.load(RUN).ledger
    assert found == ledger
    assert [c for c in found.membership.members if found.membership.is_connected(c)] == [name(3), name(4)]
    assert [c.client_id for c in found.membership.candidates()] == [name(3), name(4)]


def test_a_damaged_page_of_the_newest_snapshot_leads_to_the_one_before(state: StateDirectory) -> None:
    journal, ledger = Journal(state), Ledger()
    joined(ledger, range(20))
    journal.commit(batch_of(ledger, 1))
    before = journal.load(RUN).ledger
    ledger.membership.counted(name(3), RoundId(9))
    journal.commit(batch_of(ledger, 2))
    with state.database.transaction() as connection:
        connection.execute(text("UPDATE members SET body = replace(body, '9', '8') WHERE seq = 2"))
    recovered = journal.load(RUN)
    assert (recovered.snapshot_seq, recovered.ledger) == (1, before)
    assert "snapshot 2, page 0 of entry 2: its checksum is wrong" in recovered.faults[0]


def test_a_page_that_is_missing_is_missed(state: StateDirectory) -> None:
    journal, ledger = Journal(state), Ledger()
    joined(ledger, range(1200))
    journal.commit(batch_of(ledger, 1))
    with state.database.transaction() as connection:
        connection.execute(text("DELETE FROM members WHERE page = 1"))
    with pytest.raises(StoreCorrupted, match="it has 700 of 1200 members"):
        journal.load(RUN)


def reader(connection: Connection) -> MemberReader:
    base = read_bare_base(connection, RUN)
    return MemberReader(connection, RUN, base.first, base.seq)


def test_some_members_are_read_from_the_pages_of_their_names(state: StateDirectory) -> None:
    journal, ledger = Journal(state), Ledger()
    joined(ledger, [*range(1600, 0, -1)])
    journal.commit(batch_of(ledger, 1))
    ledger.membership.counted(name(7), RoundId(3))
    joined(ledger, [0, 700, 1700])
    journal.commit(batch_of(ledger, 2))
    everyone = sorted(ledger.membership.members.items())
    with state.database.transaction() as connection:
        assert [*reader(connection).after("")] == everyone
        assert [*islice(reader(connection).after("c0498"), 4)] == everyone[499:503]
        assert [*reader(connection).after("", "c1")] == everyone[1000:]
        assert [*reader(connection).after("c1698", "c1")] == everyone[-1:]
        assert [*reader(connection).after("", "d")] == [*reader(connection).after("", "b")] == []
        some = ("c0000", "c0007", "c0700", "c1700", "x", "")
        assert reader(connection).named(some) == {c: m for c, m in everyone if c in some}
        connection.execute(text("UPDATE members SET checksum = 0 WHERE seq = 2 AND page = 1"))
        assert len([*islice(reader(connection).after(""), 500)]) == 500, "a damaged page harms only its names"
        with pytest.raises(StoreCorrupted, match="page 1 of entry 2: its checksum is wrong"):
            reader(connection).named(["c0700"])


CHANGES = ("join", "leave", "count", "choose", "learn", "restart")
changes = st.lists(
    st.one_of(
        *(st.tuples(st.just(what), st.integers(0, 30)) for what in CHANGES),
        st.tuples(st.just("snapshot"), st.just(0)),
        st.tuples(st.just("damage"), st.just(0)),
    ),
    max_size=60,
)


def change(membership: Membership, what: str, number: int) -> None:
    client_id = name(number)
    match what:
        case "join":
            membership.joined(client_id, f"s{number}", Profile(number, "x"))
        case "leave":
            membership.lost(client_id, "left")
        case "count":
            membership.counted(client_id, RoundId(number))
        case "choose":
            membership.chosen(client_id)
        case "learn":
            membership.learnt(client_id, RoundId(number), 0.5, 1.0)
        case "restart":
            membership.everyone_disconnected()


class Kept:
    """A journal of changes: snapshots of the membership on disk, and the changes since each."""

    def __init__(self, state: StateDirectory) -> None:
        self.state, self.journal, self.ledger, self.seq = state, Journal(state), Ledger(), 0
        self.done: list[tuple[str, int]] = []
        self.taken: dict[int, int] = {}  # how much had been done at the snapshot

    def do(self, what: str, number: int) -> None:
        self.done.append((what, number))
        change(self.ledger.membership, what, number)

    def snapshot(self) -> None:
        self.seq += 1
        self.journal.commit(batch_of(self.ledger, self.seq))
        self.journal.prune(RUN, Stay())
        self.taken[self.seq] = len(self.done)
        found = self.journal.load(RUN)
        assert (found.snapshot_seq, found.ledger, found.faults) == (self.seq, self.ledger, ())

    def damage(self) -> None:
        """Damage the newest snapshot and restart from the one before and the changes since it."""
        with self.state.database.transaction() as connection:
            connection.execute(text("UPDATE snapshots SET checksum = 0 WHERE seq = :seq"), {"seq": self.seq})
        recovered, before = self.journal.load(RUN), sorted(self.taken)[-2]
        assert recovered.snapshot_seq == before
        for what, number in self.done[self.taken[before] :]:
            change(recovered.ledger.membership, what, number)
        assert recovered.ledger == self.ledger
        self.ledger = recovered.ledger
        del self.taken[self.seq]
        self.snapshot()
        self.snapshot()  # two good ones again


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(changes)
def test_the_last_good_snapshot_and_later_events_are_the_membership(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """The disk has at most twice the members for each of the last two snapshots."""
    with StateDirectory.open(tmp_path_factory.mktemp("pages") / "state") as state:
        kept = Kept(state)
        for what, number in steps:
            if what == "snapshot":
                kept.snapshot()
                assert number_of_rows(state) <= 4 * len(kept.ledger.membership.members)
            elif what == "damage" and len(kept.taken) > 1:
                kept.damage()
            elif what in CHANGES:
                kept.do(what, number)
