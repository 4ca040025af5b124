"""`make demo-large`: its tables and its exit code, and what it calls a broken promise."""

import io
import re

import pytest
from rich.console import Console

from atoll.protocol.vocabulary import ClientId, Digest, Fate, Phase, RoundId, RunState, Version
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.views.history import History
from examples.demo_large import Demo, Federation, Memory
from tests.examples.ran_demo import ran_demo

SITES, NUM_RANKS, ROUNDS = ("cluster", "north", "south"), 4, 3


def committed(number, *, lost=()):
    """A round to which all sites have sent 400 bytes, but the lost ones."""
    fates = {site: Fate.LOST if site in lost else Fate.REPORTED for site in SITES}
    clients = {
        ClientId(site): ClientRecord(0.0, fate, digest=Digest("d"), num_bytes=400) for site, fate in fates.items()
    }
    base, version = Version(number - 1), Version(number)
    return RoundRecord(
        RoundId(number), base, 0.0, 3, 3, 3, phase=Phase.COMMITTED, ended_at=3.0, version=version, clients=clients
    )


@pytest.fixture
def demo(tmp_path):
    """A demo that has ended well."""
    ranks = {f"rank {rank} of cluster": 50 for rank in range(NUM_RANKS)}
    peak = {"worker of north": 200, "worker of south": 190, **ranks}
    return Demo(
        Federation(tmp_path, "127.0.0.1:1"),
        Console(file=io.StringIO(), width=120),
        memory=Memory(idle=dict.fromkeys(peak, 10), peak=peak),
        records=[committed(number) for number in range(1, ROUNDS + 1)],
        state=RunState.FINISHED,
        healed={2: "rank 2 of cluster, 1.5 s", 3: "coordinator, 1.0 s"},
        sent=dict.fromkeys(range(NUM_RANKS), 100),
    )


def test_a_demo_that_ended_well_has_kept_its_promises(demo):
    assert demo.broken() == []


def lose_an_update(demo):
    demo.records[1] = committed(2, lost=["south"])


def lose_a_part(demo):
    del demo.sent[3]


def cut_a_part(demo):
    demo.sent[3] = 99


def kill_no_rank(demo):
    del demo.healed[2]


def hold_the_whole_model(demo):
    demo.memory.peak["rank 1 of cluster"] = 205


def stay_running(demo):
    demo.state = RunState.RUNNING


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lose_an_update, "round 2 is committed, without south"),
        (lose_a_part, "the parts of the ranks have 100, 100, 100 bytes, the updates of the sites 400"),
        (cut_a_part, "the parts of the ranks have 100, 100, 100, 99 bytes, the updates of the sites 400"),
        (kill_no_rank, "healed: coordinator, 1.0 s"),
        (hold_the_whole_model, "a rank grew by 195 B, a whole-model client by 190 B"),
        (stay_running, "the run is running, not finished"),
    ],
)
def test_a_broken_promise_is_one_sentence(demo, spoil, what):
    spoil(demo)
    [fault] = demo.broken()
    assert fault.startswith(what)


def test_the_tables_have_the_restarted_rank_and_the_bytes_of_each_rank(demo):
    demo.show()
    table = demo.console.file.getvalue()
    assert re.search(
        r"│ +2 │ committed +│ cluster, north, south │ rank 2 of cluster, 1\.5 s +│ +400 B │ +400 B │", table
    )
    assert re.search(r"│ +3 │ committed +│ cluster, north, south │ coordinator, 1\.0 s +│ +400 B │ +400 B │", table)
    for rank in range(NUM_RANKS):
        assert re.search(rf"│ rank {rank} of cluster +│ +100 B │ +10 B │ +50 B │ +40 B │", table)
    assert re.search(r"│ worker of north +│ +400 B │ +10 B │ +200 B │ +190 B │", table)


def versions_in(log):
    """The first digits of the version that a site has verified for each round."""
    return {
        int(number): digest for number, digest in re.findall(r"verified: round (\d+) of text-1, version (\w+)", log)
    }


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_rank_and_the_coordinator_are_killed_and_nothing_is_lost(tmp_path):
    out = tmp_path / "out"
    printed = ran_demo("demo_large", out, timeout_s=900)
    assert "nothing was lost: every round has one update of each site" in printed
    assert re.search(r"│ +2 │ committed +│ cluster, north, south │ rank 2 of cluster, \d+\.\d s │", printed)
    assert re.search(r"│ +3 │ committed +│ cluster, north, south │ coordinator, \d+\.\d s +│", printed)
    assert "the ranks start again (1 of 3)" in (out / "cluster.log").read_text()

    rounds = History(out / "coordinator").rounds("text-1")
    assert [(record.round_id, record.phase) for record in rounds] == [
        (n, Phase.COMMITTED) for n in range(1, ROUNDS + 1)
    ]
    for record in rounds:
        assert sorted(record.clients) == sorted(SITES)
        assert len({client.digest for client in record.clients.values()}) == len(SITES)
    made = {record.round_id + 1: record.model_digest[:12] for record in rounds[:-1]}
    for site in SITES:
        seen = versions_in((out / f"{site}.log").read_text())
        assert {number: seen[number] for number in made} == made, site

    sent = [float(size) for size in re.findall(r"│ rank \d of cluster +│ +([\d.]+) MB │", printed)]
    [whole] = {client.num_bytes for record in rounds for client in record.clients.values()}
    assert len(sent) == NUM_RANKS
    assert sum(sent) == pytest.approx(whole / 1e6, abs=0.05 * NUM_RANKS)  # each is rounded
