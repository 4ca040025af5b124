"""`make demo-private`: what it prints and promises."""

import io
import re

import pytest
from rich.console import Console

from atoll.protocol.vocabulary import ClientId, Digest, Fate, Phase, RoundId, RunState, Version
from atoll.server.rounds.record import ChargeRecord, ClientRecord, RoundRecord
from atoll.server.views.history import History
from examples.demo_private import SITES, STRANGER, Demo, Federation
from tests.examples.ran_demo import ran_demo

KINDS = {
    1: "inspector is refused",
    2: "the agent of east is killed",
    3: "a rank is killed",
    4: "the coordinator is killed",
}


def committed(number, *, without=(), extra=()):
    """A round in whose sum are all sites but some."""
    members = {*SITES, *extra} - {*without}
    clients = {ClientId(site): ClientRecord(0.0, Fate.REPORTED, digest=Digest("d"), num_bytes=400) for site in members}
    record = RoundRecord(
        RoundId(number), Version(number - 1), 0.0, 6, 4, 5, phase=Phase.COMMITTED, ended_at=3.0, clients=clients
    )
    record.version, record.charge = Version(number), ChargeRecord(5, number, 0.3 * number, 1.85, 1e-4)
    return record


class Scripted(Demo):
    """A demo whose commands answer what a test says."""

    epsilon = 1.8

    def claim(self):
        """Answer as `atoll privacy show`."""
        return {"epsilon": self.epsilon, "epsilon_max": 1.85, "sentence": "the guarantee"}

    def spent(self):
        """Answer as `atoll site budgets`."""
        return {site: {"charges": 4, "spent": 1.8, "epsilon_max": 4.0} for site in SITES}


@pytest.fixture
def demo(tmp_path):
    """A demo that has ended well."""
    return Scripted(
        Federation(tmp_path, "127.0.0.1:1"),
        Console(file=io.StringIO(), width=132),
        records=[committed(1), committed(2, without=["east"]), committed(3), committed(4)],
        state=RunState.FINISHED,
        cause="the privacy budget is spent: epsilon 1.8 of 1.85 at delta 0.0001 after 4 rounds",
        loss={1: 2.7, 4: 2.5},
        happened=dict(KINDS),
        masked={"north": 0.5003},
        refusals=dict.fromkeys(SITES, "secure: a training outside of a secure sum: this site demands one"),
    )


def test_a_demo_that_ended_well_has_kept_its_promises(demo):
    assert demo.broken() == []


def admit_the_stranger(demo):
    demo.records[0] = committed(1, extra=[STRANGER])


def lose_two(demo):
    demo.records[1] = committed(2, without=["east", "west"])


def kill_nobody(demo):
    del demo.happened[3]


def send_plain(demo):
    demo.masked["west"] = 0.43


def see_nothing(demo):
    demo.masked.clear()


def learn_nothing(demo):
    demo.loss = {1: 2.7, 4: 2.7}


def overspend(demo):
    demo.epsilon = 1.86


def end_otherwise(demo):
    demo.cause = "50 rounds are committed"


def answer_a_plain_run(demo):
    del demo.refusals["mesh"]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (admit_the_stranger, "round 1 is committed, with the sum of "),
        (lose_two, "round 2 is committed, with the sum of mesh, north, south"),
        (kill_nobody, "on the way: inspector is refused; the agent of east is killed; the coordinator is killed; not"),
        (send_plain, "43.0% of the bits of a masked update of west are 1: it is not masked"),
        (see_nothing, "the killed coordinator had no masked update on its disk"),
        (learn_nothing, "the loss did not fall: 2.700, 2.700"),
        (overspend, "epsilon 1.86 of 1.85"),
        (end_otherwise, "the run ended because 50 rounds are committed, not by its budget"),
        (answer_a_plain_run, "the plain run was not refused by mesh"),
    ],
)
def test_a_broken_promise_is_one_sentence(demo, spoil, what):
    spoil(demo)
    [fault] = demo.broken()
    assert fault.startswith(what)


def test_what_is_counted_of_an_update_in_parts_are_its_tensors(demo):
    """Text has fewer bits that are 1: a demo that counted a part's manifest said that the site is not masked."""
    updates = demo.processes.state / "runs" / "private-1" / "updates"
    updates.mkdir(parents=True)
    for name in ("d.0000.bin", "d.0000.json", "d.0001.bin", "d.0001.json", "e.bin"):
        (updates / name).touch()
    assert [path.name for path in demo._files_of("d")] == ["d.0000.bin", "d.0001.bin"]
    assert [path.name for path in demo._files_of("e")] == ["e.bin"]
    assert demo._files_of(None) == []


def test_the_tables_have_the_members_the_deaths_and_what_was_spent(demo):
    told = "round 2 of run private-1 is charged to text: 4 steps by this site; spent now epsilon 0.60123 of 4 at delta"
    (demo.processes.folder / "north.log").write_text(f"2026-11-30 11:00:00 north: {told}\n")
    demo.show()
    told = demo.console.file.getvalue()
    assert re.search(r"│ +2 │ mesh, north, south, west +│ the agent of east is killed +│ +0\.60 │", told)
    assert re.search(r"│ north +│ +4 │ +1\.800 │ +4 │ 4 masked updates of 400 B; 50\.0% of the bits", told)
    assert "the guarantee" in told


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(2100)
def test_five_sites_end_by_their_budget_through_three_deaths_and_two_lies(tmp_path):
    out = tmp_path / "out"
    printed = ran_demo("demo_private", out, timeout_s=2000)
    assert "north answers: inspector is not pinned here" in printed
    assert "all five refuse: secure: a training outside of a secure sum" in printed
    history = History(out / "coordinator")
    assert history.run("private-1").cause.startswith("the privacy budget is spent")
    for record in history.rounds("private-1"):
        assert record.phase is Phase.COMMITTED
        assert {row.num_examples for row in record.clients.values()} <= {0, 1}, "nothing of a single site"
    assert "the ranks start again" in (out / "mesh.log").read_text()
    for site in SITES:
        assert "inspector is not pinned here" in (out / f"{site}.log").read_text()
