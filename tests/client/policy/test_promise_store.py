"""The durable promises: kept over crashes at any instant, never taken back by damage, and remembered of peers."""

import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.client.policy.database import NAME, HistoryUnusable, PolicyDatabase
from atoll.client.policy.promise_store import PromiseStore
from atoll.client.secure.promises import GENESIS, REMEMBERED, Kind, PeerChains, Promise, Promises, extended, promise_of
from atoll.protocol.secure.messages import Chain
from tests.server.sessions.small_federation import terms_of
from tests.waiting import BOUND_S

KEY = b"k" * 32
RESTARTS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opened(folder: Path) -> PromiseStore:
    store = PromiseStore(PolicyDatabase(folder))
    if not store.site_key and not store.fault:
        store.begin(KEY)
    return store


def promise(number: int, kind: Kind = Kind.JOINED, **terms: Any) -> Promise:
    return promise_of(kind, terms_of(round=number, **terms), "ab" * 32 if kind is Kind.SIGNED else "")


def crashed(folder: Path, to: Path) -> Path:
    """Copy what a crash at this instant leaves on the disk: the files, without the memory that SQLite shares."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, ignore=lambda _, names: [name for name in names if name.endswith("-shm")])
    return to


promises = st.lists(
    st.tuples(
        st.integers(1, 3),  # round
        st.integers(1, 3),  # attempt
        st.sampled_from(Kind),
        st.sampled_from(["digits-1", "digits-2"]),
        st.sampled_from(["update", "evaluation"]),
    ),
    max_size=12,
    unique=True,
)


@RESTARTS
@given(given=promises)
def test_a_crash_after_any_promise_finds_all_that_were_given_and_forbids_the_same(tmp_path: Path, given: Any) -> None:
    home = tmp_path / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    store, model = opened(home), Promises(base_repeats_max=2)
    for number, attempt, kind, run, purpose in given:
        made = promise(number, kind, attempt=attempt, run=run, purpose=purpose)
        before = PromiseStore(PolicyDatabase(crashed(home, tmp_path / "before")))
        store.keep(made)
        model.add(made)
        after = PromiseStore(PolicyDatabase(crashed(home, tmp_path / "after")))
        assert not after.fault
        assert (before.num_promises + 1, after.promises.chain) == (after.num_promises, model.chain)
    found = PromiseStore(PolicyDatabase(crashed(home, tmp_path / "after"))).promises
    found.base_repeats_max = 2
    for number in range(1, 5):
        for attempt in range(1, 5):
            for run in ("digits-1", "digits-2", "digits-3"):
                for purpose in ("update", "evaluation"):
                    asked = terms_of(round=number, attempt=attempt, run=run, purpose=purpose)
                    assert found.fault(asked) == model.fault(asked)


@RESTARTS
@given(given=promises, cut=st.integers(0, 12))
def test_a_restored_backup_allows_nothing_that_its_own_promises_forbid(tmp_path: Path, given: Any, cut: int) -> None:
    """What a backup holds still binds; what came after it shows to peers as another history from the first entry on."""
    home = tmp_path / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    store, ends = opened(home), [GENESIS]
    backup = crashed(home, tmp_path / "backup")
    for index, (number, attempt, kind, run, purpose) in enumerate(given):
        store.keep(promise(number, kind, attempt=attempt, run=run, purpose=purpose))
        ends.append(store.promises.chain)
        if index + 1 == cut:
            backup = crashed(home, tmp_path / "backup")
    restored = PromiseStore(PolicyDatabase(backup))
    at = restored.num_promises
    assert restored.promises.chain == ends[at]
    restored.keep(promise(99))
    shown = [after for before, after in pairwise(ends) if after.count > before.count]  # where keys were sent
    peer = PeerChains()
    for end in shown:
        peer.remember(KEY, end)
    is_seen = restored.promises.chain.count <= len(shown)
    assert peer.is_fork(KEY, restored.promises.chain) == is_seen, "unless no later end has left"
    for number in range(100, 103):
        peer.accuse(KEY, restored.promises.chain)
        restored.keep(promise(number))
        assert peer.is_fork(KEY, restored.promises.chain) == is_seen, "for good"


@pytest.mark.real
def test_what_was_promised_survives_kill_9(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tests.client.policy.test_promise_store import opened, promise
store = opened(Path({str(tmp_path)!r}))
store.peers.remember(b"p" * 32, store.promises.chain)
store.keep(promise(1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=BOUND_S)
    assert done.returncode == -signal.SIGKILL
    store = opened(tmp_path)
    assert store.promises.chain == extended(GENESIS, promise(1))
    assert dict(store.peers.items()) == {b"p" * 32: GENESIS}, "in the same transaction"


def test_a_promise_that_is_given_again_is_one_and_another_in_its_place_is_none(tmp_path: Path) -> None:
    store = opened(tmp_path)
    signed = promise(1, Kind.SIGNED)
    for _ in range(2):
        store.keep(signed)
    assert store.num_promises == 1
    other = promise_of(Kind.SIGNED, terms_of(round=1), "cd" * 32)
    with pytest.raises(HistoryUnusable, match="UNIQUE"):
        store.keep(other)
    assert opened(tmp_path).promises.chain == extended(GENESIS, signed)


_CHANGES = [
    "UPDATE promises SET round = round + 9 WHERE number = ?",
    "UPDATE promises SET attempt = attempt + 1 WHERE number = ?",
    "UPDATE promises SET session = session + 1 WHERE number = ?",
    "UPDATE promises SET run = 'x' WHERE number = ?",
    "UPDATE promises SET purpose = 'x' WHERE number = ?",
    "UPDATE promises SET base = 'x' WHERE number = ?",
    "UPDATE promises SET survivors = 'x' WHERE number = ?",
    "UPDATE promises SET kind = 'fine' WHERE number = ?",
    "UPDATE promises SET hash = x'00' WHERE number = ?",
    "UPDATE promises SET number = number + 100 WHERE number = ?",
    "DELETE FROM promises WHERE number = ? - (? = 4)",
]


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_row_that_was_changed_or_taken_out_breaks_the_chain(tmp_path: Path, change: str, number: int) -> None:
    store = opened(tmp_path)
    for each in (1, 2):
        store.keep(promise(each))
        store.keep(promise(each, Kind.SIGNED))
    store._database.execute(change, (number,) * change.count("?"))
    broken = opened(tmp_path)
    assert "nothing is allowed" in broken.fault
    assert "accept-rollback --new-key" in broken.fault
    assert broken.num_promises < 4


def test_a_chain_without_its_end_is_an_older_one_which_only_its_peers_can_see(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for each in (1, 2):
        store.keep(promise(each))
    store._database.execute("DELETE FROM promises WHERE number = 2")
    cut = opened(tmp_path)
    assert (cut.fault, cut.num_promises) == ("", 1)
    store.peers.remember(KEY, store.promises.chain)
    cut.keep(promise(3))
    assert store.peers.is_fork(KEY, cut.promises.chain)


@pytest.mark.parametrize("damage", ["DELETE FROM site_key", "UPDATE peer_chains SET hash = x'00'"])
def test_rows_beside_the_chain_are_checked_too(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    store.peers.remember(b"p" * 32, GENESIS)
    store.keep(promise(1))
    store._database.execute(damage)
    assert opened(tmp_path).fault


def test_a_new_beginning_keeps_what_can_be_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for each in (1, 2, 3):
        store.keep(promise(each, Kind.SIGNED))
    store._database.execute("DELETE FROM promises WHERE number = 2")
    store._database.execute("INSERT INTO peer_chains VALUES (x'00', 1, x'00')")
    broken = opened(tmp_path)
    assert broken.fault
    broken.begin(b"n" * 32)
    for found in (broken, opened(tmp_path)):
        assert (found.fault, found.site_key, found.num_promises) == ("", b"n" * 32, 2)
        binds = [bool(found.promises.fault(terms_of(round=number, attempt=2, model="cd" * 32))) for number in (1, 2, 3)]
        assert binds == [True, False, True]


def test_ends_of_peers_and_forks_are_remembered_up_to_the_bound(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for count in range(REMEMBERED + 10):
        store.peers.remember(b"p" * 32, Chain(count, count.to_bytes(32)))
    store.peers.forked.add(b"q" * 32)
    store.remember_peers()
    store.remember_peers()
    for count in range(200, 203):
        store.peers.remember(b"p" * 32, Chain(count, count.to_bytes(32)))
    store.remember_peers()
    found = opened(tmp_path).peers
    ends = [chain.count for _, chain in found.items()]
    assert ends == [*range(13, REMEMBERED + 10), 200, 201, 202]
    assert found.is_fork(b"q" * 32, Chain(1, bytes(32)))
    assert not found.is_fork(b"p" * 32, Chain(202, (202).to_bytes(32)))
    assert found.is_fork(b"p" * 32, Chain(12, (12).to_bytes(32))), "older than all that are remembered"


def test_a_full_disk_gives_no_promise(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(HistoryUnusable) as raised:
        [store.keep(promise(number + 1, run="x" * 500)) for number in range(1000)]
    assert raised.value.errno == errno.ENOSPC
    assert store.promises.chain == opened(tmp_path).promises.chain, "memory and disk agree"


def test_many_promises_are_read_quickly(tmp_path: Path) -> None:
    """Half a year of rounds every ten minutes: the chain is hashed once, at a start."""
    store, chain = opened(tmp_path), GENESIS
    rows = []
    for number in range(20_000):
        made = promise(number + 1)
        chain = extended(chain, made)
        where = made.run, made.purpose, made.round, made.attempt, made.session
        rows.append((number + 1, str(made.kind), *where, made.base, made.survivors, chain.hash))
    with closing(sqlite3.connect(tmp_path / NAME)) as database, database:
        database.executemany("INSERT INTO promises VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    store._database.close()
    assert opened(tmp_path).promises.chain == chain


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_were_overwritten_beside_a_log_are_noticed_at_the_start_or_change_nothing(
    tmp_path: Path, seed: int
) -> None:
    draw, home = random.Random(seed), tmp_path / "home"
    home.mkdir()
    store = opened(home)
    for number in range(1, draw.randint(20, 60)):
        store.keep(promise(number))
    if seed % 2:
        store._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    store.keep(promise(99))
    damaged = crashed(home, tmp_path / "damaged")
    assert (damaged / f"{NAME}-wal").exists()
    with (damaged / NAME).open("r+b") as file:
        file.seek(draw.randrange((damaged / NAME).stat().st_size))
        file.write(draw.randbytes(3000))
    try:
        found = PromiseStore(database := PolicyDatabase(damaged))
    except HistoryUnusable:
        with pytest.raises(HistoryUnusable, match="put the state directory back from a newer copy, or"):
            PolicyDatabase(damaged)
        return
    assert found.fault or found.promises == store.promises
    (whole,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    assert whole == "ok"
    database.close()
    again = PromiseStore(PolicyDatabase(damaged))  # the log was written into the file
    assert (again.fault, again.promises) == (found.fault, found.promises)


def test_a_damaged_page_that_no_query_reads_at_the_start_is_found_there(tmp_path: Path) -> None:
    with closing(PolicyDatabase(tmp_path)) as database, database.transaction():
        database.execute_each(
            "INSERT INTO rounds VALUES ('r', ?, ?, '2026-01-01', NULL)", ((n, "x" * 99) for n in range(900))
        )
    path = tmp_path / NAME
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 9000)
        file.write(bytes(3000))
    with pytest.raises(HistoryUnusable, match=r"policy.db is damaged: .*accept-rollback --new-key"):
        PolicyDatabase(tmp_path)
