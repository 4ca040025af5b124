"""Parts spread over aggregation ranks, as processes with kill -9: nothing is lost, nothing counts twice, same bits."""

import hashlib
import json
import signal

import pytest

from benchmarks.dividing import VARIABLE
from tests.federation.processes import ended_after, federation
from tests.federation.test_ranks import MODEL_BYTES, SITES, TASK, Ranked, digests

PARTS = 8
"""Twice the streams of an update: when the second half begins, the first is kept."""


class Spread(Ranked):
    """Two ranks of their own; updates that are whole, in three parts, and of client c in eight, slowly."""

    def begin(self, crashes=("", "")):
        """Start all processes; one of them may die at a named step."""
        who, step = crashes
        at = {who: {"ATOLL_CRASH_AT": step}}
        self.host(rounds=2, environment=at.get("coordinator", {}))
        for number in (0, 1):
            self.rank(number, **at.get(f"rank{number}", {}))
        self.agent("a")
        self.agent("b", environment={VARIABLE: "stripes:3"})
        self.agent("c", environment={VARIABLE: f"rows:{PARTS}"}, upload_limit=MODEL_BYTES // 3)

    def kept(self, number, digest):
        """The parts of an update that are kept at a rank."""
        found = self.folder.glob(f"rank{number}/runs/trouble-1/updates/{digest}.*.json")
        return {int(path.name[65:69]) for path in found}

    def hold_half_kept(self, round_id):
        """Stop agent c when both ranks have kept parts of its update, and others are missing; return its digest."""
        root = self.folder / "c" / "spool" / f"trouble-1.{round_id}.parts" / "root.json"
        self.wait_for(root.exists, every=0.02)
        written, _ = json.JSONDecoder().raw_decode(root.read_bytes().decode("latin-1"))
        digest = hashlib.sha256(written["manifest"].encode()).hexdigest()
        self.wait_for(lambda: bool(self.kept(0, digest) and self.kept(1, digest)), every=0.01)
        self.running["c"].send_signal(signal.SIGSTOP)
        assert len(self.kept(0, digest) | self.kept(1, digest)) < PARTS
        self.wait_for(lambda: (record := self.open_round()) is not None and record.num_reported == 2)
        return digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digests of two rounds of whole updates without ranks."""
    with federation(tmp_path_factory.mktemp("undisturbed"), task=TASK) as it:
        it.coordinator(rounds=2, round__cohort_size=3, evaluation__server_every=0)
        for site in SITES:
            it.agent(site)
        assert it.wait_for_end() == 0
        return digests(it)


def check(it, undisturbed):
    for name in ("coordinator", *SITES):
        assert it.wait_for_end(name) == 0
    assert digests(it) == undisturbed
    assert all(len(record.clients) == record.num_reported == 3 for record in it.rounds())
    assert it.log("c").count("trained ") == 2, "no update is trained twice"


def test_no_death_of_a_rank_or_of_the_coordinator_changes_the_models(tmp_path, undisturbed):
    with ended_after(Spread(tmp_path)) as it:
        it.begin()
        it.hold_half_kept(1)
        it.kill("rank1")
        it.go_on()
        it.rank(1)
        it.wait_for(lambda: len(digests(it)) == 2)
        it.hold_half_kept(2)
        it.kill("coordinator")  # and with it what it knew of kept parts
        it.host(rounds=2)
        it.go_on()
        check(it, undisturbed)
        assert "resend" not in it.log("coordinator")


@pytest.mark.long
def test_the_parts_of_a_rank_that_stays_away_go_to_the_next_and_what_it_has_kept_counts(tmp_path, undisturbed):
    with ended_after(Spread(tmp_path)) as it:
        it.begin()
        digest = it.hold_half_kept(1)
        of_dead = it.kept(1, digest)
        it.kill("rank1")
        it.go_on()
        it.wait_for(lambda: it.kept(0, digest) | of_dead == set(range(PARTS)))
        it.wait_for(lambda: it.rounds()[0].num_reported == 3)
        assert not it.kept(0, digest) & of_dead, "what the dead rank has kept is not sent again"
        assert set(range(1, PARTS, 2)) - of_dead <= it.kept(0, digest), "what was on its way there has moved"
        assert len(digests(it)) == 1, "the fold waits for the rank"
        it.rank(1)
        check(it, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "step"),
    [
        ("rank1", "upload.before_check:2"),  # all bytes of a part are here
        ("rank1", "upload.part_kept:2"),  # it is durable, and not reported
        ("coordinator", "upload.before_accept:2"),  # all parts are reported, and there is no decision
        ("coordinator", "journal.before_write:9"),
        ("coordinator", "journal.after_write:9"),
    ],
)
def test_a_death_at_a_named_step_changes_nothing(tmp_path, undisturbed, who, step):
    with ended_after(Spread(tmp_path)) as it:
        it.begin((who, step))
        it.wait_for_death(who)
        it.host(rounds=2) if who == "coordinator" else it.rank(1)
        check(it, undisturbed)
