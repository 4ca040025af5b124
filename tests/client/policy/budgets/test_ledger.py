"""The ledger on disk: durable, fail closed after any damage, and never overspent by two writers."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.client.policy.budgets.account import leaving, needed
from atoll.client.policy.budgets.anchor import NAME as ANCHOR
from atoll.client.policy.budgets.entries import KINDS, Charged, Closed, Entry, Left, Opened, read_entry, text_of
from atoll.client.policy.budgets.ledger import Ledger
from atoll.client.policy.database import NAME, HistoryUnusable, PolicyDatabase
from atoll.ground.strict_json import ManifestError
from atoll.protocol.privacy.composition import Steps
from tests.client.policy.budgets.test_account import budget, charge, work


def opened(folder: Path, at: Path | None = None) -> Ledger:
    return Ledger(PolicyDatabase(at or folder), folder)


def spend(ledger: Ledger, round_: int = 1, **what: Any) -> str:
    return ledger.change(lambda accounts: needed(accounts, [budget()], work(round_), charge(**what), 1.5))[1]


def closed(ledger: Ledger) -> None:
    ledger._database.close()


def written(folder: Path, rounds: int = 3) -> list[Entry]:
    """A ledger with some charges and an update that has left."""
    ledger = opened(folder)
    for round_ in range(1, rounds + 1):
        assert not spend(ledger, round_)
    ledger.change(lambda accounts: leaving(accounts, [budget()], work(1), "u", 2.5))
    closed(ledger)
    return entries_of(folder)


def entries_of(folder: Path) -> list[Entry]:
    with sqlite3.connect(folder / NAME) as database:
        rows = database.execute("SELECT kind, data, content FROM budgets ORDER BY number").fetchall()
    database.close()
    return [read_entry(*row) for row in rows]


def test_a_charge_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for round_ in range(1, 4):
        assert not spend(ledger, round_)
        copy = tmp_path / f"copy-{round_}"
        copy.mkdir()
        for file in (NAME, f"{NAME}-wal", ANCHOR):
            shutil.copy(tmp_path / file, copy / file)
        found = opened(copy)
        assert not found.fault
        assert len(found.read().account("mri-2026").charges) == round_


def test_a_ledger_that_is_read_again_has_the_same_accounts_and_charges_no_repetition(tmp_path: Path) -> None:
    before = written(tmp_path)
    ledger = opened(tmp_path)
    assert not spend(ledger, 2)
    closed(ledger)
    assert entries_of(tmp_path) == before
    assert [entry.kind for entry in before] == ["opened", "charged", "charged", "charged", "left"]


DAMAGES: dict[str, Any] = {
    "a charge removed": "DELETE FROM budgets WHERE number = 3",
    "the last charge removed": "DELETE FROM budgets WHERE number = 5",
    "all removed": "DELETE FROM budgets",
    "a number changed": "UPDATE budgets SET number = 9 WHERE number = 3",
    "a name changed": "UPDATE budgets SET data = 'other' WHERE number = 3",
    "a kind changed": "UPDATE budgets SET kind = 'closed' WHERE number = 5",
    "a text changed": "UPDATE budgets SET content = replace(content, 'digits-1', 'digits-2') WHERE number = 3",
    "a hash changed": "UPDATE budgets SET hash = zeroblob(32) WHERE number = 3",
    "two swapped": "UPDATE budgets SET content = (SELECT content FROM budgets AS other WHERE other.number = "
    "7 - budgets.number) WHERE number IN (3, 4)",
    "no table": "DROP TABLE budgets",
    "an unknown schema": "PRAGMA user_version = 7",
}


@pytest.mark.parametrize("damage", [*DAMAGES])
def test_a_damaged_ledger_allows_nothing_and_says_the_way_out(tmp_path: Path, damage: str) -> None:
    written(tmp_path)
    with sqlite3.connect(tmp_path / NAME, isolation_level=None) as database:
        database.execute(DAMAGES[damage])
    database.close()
    if damage in ("no table", "an unknown schema"):
        with pytest.raises(HistoryUnusable, match=NAME):
            opened(tmp_path)
        return
    ledger = opened(tmp_path)
    assert "nothing is allowed; put the newer copy back, or close the names" in ledger.fault
    assert spend(ledger, 9) == ledger.fault
    assert ledger.read().of == {}


@pytest.mark.parametrize("kept", [5, 4, 2, 0])
@pytest.mark.parametrize("by", ["ledger", "log"])
def test_a_memory_that_was_removed_with_the_tail_of_the_ledger_allows_nothing(
    tmp_path: Path, kept: int, by: str
) -> None:
    """What is left of the ledger says that this agent had charged, or the log of its decisions does."""
    written(tmp_path)
    (tmp_path / "folder_id").write_text(work(1).agent if by == "ledger" else "f" * 32)
    (tmp_path / "decisions").mkdir()
    line = "privacy.charge" if by == "log" else "train.allowed"
    (tmp_path / "decisions" / "audit-000000000001.jsonl").write_text(json.dumps({"action": line}) + "\n")
    (tmp_path / ANCHOR).unlink()
    with sqlite3.connect(tmp_path / NAME, isolation_level=None) as database:
        database.execute("DELETE FROM budgets WHERE number > ?", [kept])
    database.close()
    ledger = opened(tmp_path)
    is_seen = by == "log" or kept > 1
    assert ("its memory of them" in ledger.fault) is is_seen
    assert bool(spend(ledger, 9)) is is_seen
    if is_seen:
        assert ledger.close_names(["mri-2026"], 3.0) == ["mri-2026"]
        closed(ledger)
        again = opened(tmp_path)
        assert not again.fault, "the names are closed, and the memory is there"
        assert "counts as spent" in spend(again, 9)


def test_a_memory_that_vanishes_while_the_agent_runs_allows_nothing(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert not spend(ledger, 1)
    (tmp_path / ANCHOR).unlink()
    assert "was removed" in spend(ledger, 2)


def test_an_agent_that_shares_a_ledger_and_has_charged_nothing_needs_no_memory(tmp_path: Path) -> None:
    written(tmp_path)
    (other := tmp_path / "other").mkdir()
    (other / "folder_id").write_text("e" * 32)
    ledger = opened(other, tmp_path)
    assert not ledger.fault
    assert not spend(ledger, 4)
    assert (other / ANCHOR).exists()


def test_a_first_charge_that_is_cut_off_before_its_memory_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the empty ledger is written before the charge is durable."""
    remember, calls = Ledger._remember, []

    def cut(self: Ledger, *, is_first: bool = False) -> None:
        calls.append(is_first)
        if not is_first:
            raise KeyboardInterrupt
        remember(self, is_first=True)

    monkeypatch.setattr(Ledger, "_remember", cut)
    ledger = opened(tmp_path)
    (tmp_path / "folder_id").write_text(work(1).agent)
    with pytest.raises(KeyboardInterrupt):
        spend(ledger, 1)
    assert calls == [True, False]
    monkeypatch.undo()
    closed(ledger)
    again = opened(tmp_path)
    assert not again.fault
    assert len(again.read().account("mri-2026").charges) == 1


def test_a_removed_and_an_older_file_allow_nothing_beside_the_agent_s_memory(tmp_path: Path) -> None:
    written(tmp_path, rounds=2)
    older = (tmp_path / NAME).read_bytes()
    written(tmp_path, rounds=3)
    for content in (older, b""):
        (tmp_path / NAME).write_bytes(content)
        ledger = opened(tmp_path)
        assert "it was put back from an older copy, or removed" in ledger.fault
        assert spend(ledger, 1) == ledger.fault
        closed(ledger)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"count": 0, "hash": "", "names": []}', b"\xff", b"[1]"])
def test_a_damaged_memory_allows_nothing(tmp_path: Path, content: bytes) -> None:
    written(tmp_path)
    (tmp_path / ANCHOR).write_bytes(content)
    assert f"{ANCHOR} has been changed" in opened(tmp_path).fault


def test_after_a_loss_every_known_name_is_closed_and_a_new_one_begins(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / NAME).unlink()
    ledger = opened(tmp_path)
    assert ledger.close_names(["policy-1"], 5.0) == ["mri-2026", "policy-1"]
    assert not ledger.fault
    assert "a new budget is a new name" in spend(ledger)
    fresh = budget(name="mri-2027")
    assert ledger.change(lambda accounts: needed(accounts, [fresh], work(), charge(), 6.0))[1] == ""
    closed(ledger)
    again = opened(tmp_path)
    assert not again.fault
    assert again.close_names([], 7.0) == ["mri-2027"], "the agent remembers this name, too"


def test_a_broken_chain_is_closed_with_the_names_in_it(tmp_path: Path) -> None:
    written(tmp_path)
    with sqlite3.connect(tmp_path / NAME, isolation_level=None) as database:
        database.execute("UPDATE budgets SET data = 'other' WHERE number = 3")
    database.close()
    (tmp_path / ANCHOR).unlink()
    ledger = opened(tmp_path)
    assert ledger.close_names([], 5.0) == ["mri-2026", "other"]
    assert not ledger.fault
    assert [type(entry.content) for entry in entries_of(tmp_path)] == [Closed, Closed]


def test_any_flipped_bit_allows_nothing_or_changes_nothing(tmp_path: Path) -> None:
    home, rng = tmp_path / "home", random.Random(7)
    home.mkdir()
    before = written(home, rounds=6)
    whole = (home / NAME).read_bytes()
    at = [index for index in range(len(whole)) if whole[index]]  # zeros are free space, but for some of the headers
    refused = 0
    for index in [*range(100), *rng.sample(at, 300), *rng.sample(range(len(whole)), 100)]:
        bit = 1 << rng.randrange(8)
        changed = bytearray(whole)
        changed[index] ^= bit
        (home / NAME).write_bytes(changed)
        try:
            ledger = opened(home)
        except HistoryUnusable:
            refused += 1
        else:
            if ledger.fault:
                assert spend(ledger, 99) == ledger.fault
                refused += 1
            else:
                assert entries_of(home) == before, f"bit {bit} of byte {index}"
            closed(ledger)
        for file in (f"{NAME}-wal", f"{NAME}-shm"):
            (home / file).unlink(missing_ok=True)
    assert refused > 100


WRITER = """
import sys
from pathlib import Path
from atoll.client.policy.budgets.account import needed
from atoll.client.policy.budgets.ledger import Ledger
from atoll.client.policy.database import PolicyDatabase
from tests.client.policy.budgets.test_account import budget, charge, work
shared, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
ledger = Ledger(PolicyDatabase(shared), folder)
sys.stdin.readline()
won = 0
for round_ in range(1, 60):
    entries, fault = ledger.change(lambda a: needed(a, [budget()], work(round_, agent=name), charge(3.0), 1.0))
    won += not fault
print(won)
"""


def test_two_processes_that_share_a_ledger_never_spend_more_than_the_budget(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    closed(opened(shared))
    writers = []
    for name in ("a" * 32, "b" * 32):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", WRITER, str(shared), str(tmp_path / name), name]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        writers.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()}, **pipes))
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    won = [int(writer.communicate(timeout=120)[0]) for writer in writers]
    from atoll.protocol.privacy import gaussian

    assert sum(won) == gaussian.uses_within(8.0, 1e-6, 3.0)
    ledger = opened(tmp_path / ("a" * 32), shared)
    assert not ledger.fault
    assert ledger.read().account("mri-2026").spent(budget()) <= 8.0


def test_a_ledger_that_another_agent_has_filled_is_read_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    one, two = opened(first), opened(second, first)
    assert not spend(one, 1)
    assert len(two.read().account("mri-2026").charges) == 1
    assert not spend(two, 2)
    assert len(one.read().account("mri-2026").charges) == 2


texts = st.text(max_size=20).filter(lambda text: text.isprintable())
numbers = st.floats(1e-9, 1e9)
contents = st.one_of(
    st.builds(Opened, numbers, st.floats(1e-12, 0.9), st.sampled_from(["client", "example"])),
    st.builds(
        Charged,
        numbers,
        st.builds(work, st.integers(0, 2**40), texts, texts),
        st.builds(
            charge,
            st.floats(1e-3, 1e9),
            texts,
            st.sampled_from(["client", "example"]),
            st.floats(1e-9, 1.0),
            st.integers(1, 99),
        ),
    ),
    st.builds(Left, numbers, st.integers(1, 2**40), texts),
    st.builds(Closed, numbers),
)


@given(content=contents, name=texts)
def test_a_text_of_an_entry_is_read_as_the_entry(content: Any, name: str) -> None:
    entry = Entry(name, content)
    assert read_entry(entry.kind, name, text_of(content)) == entry


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(content=contents, at=st.integers(0, 500), letter=st.characters(), kind=st.sampled_from([*KINDS]))
def test_another_text_is_another_entry_or_none(content: Any, at: int, letter: str, kind: str) -> None:
    text = text_of(content)
    changed = text[: at % len(text)] + letter + text[at % len(text) + 1 :]
    try:
        found = read_entry(kind, "d", changed)
    except ManifestError:
        return
    assert (text_of(found.content), found.kind) == (changed, kind)


@pytest.mark.parametrize("letter", ["\xe9", "\u2003", "\udcad", "\U0001f600"])
def test_a_letter_that_no_entry_has_is_not_read_as_another_one(letter: str) -> None:
    text = text_of(Left(1.0, 2, "what?"))
    assert read_entry("left", "d", text).content == Left(1.0, 2, "what?")
    with pytest.raises(ManifestError, match="in ASCII"):
        read_entry("left", "d", text.replace("?", letter))


@pytest.mark.parametrize(("noise", "rate"), [(1e-308, 1.0), (9e-4, 0.5), (1e10, 0.5), (1.0, 1e-10)])
def test_steps_that_no_account_can_count_are_no_entry(noise: float, rate: float) -> None:
    """Their noise multiplier was squared to 0, so that the agent died of a division."""
    content = Charged(1.0, work(), charge(noise, unit="example", rate=rate))
    with pytest.raises(ManifestError, match=r"entry charged.steps"):
        read_entry("charged", "d", text_of(content))


@given(kind=st.one_of(st.none(), st.binary(), texts), text=st.one_of(st.none(), st.binary(), st.text(max_size=60)))
def test_rows_of_anything_are_refused(kind: Any, text: Any) -> None:
    with pytest.raises(ManifestError):
        read_entry(kind, "d", text)


def test_a_charge_of_several_kinds_is_read_as_it_was(tmp_path: Path) -> None:
    both = (Steps(1.1, 0.01, 100), Steps(4.0, 1.0, 1))
    from atoll.client.policy.budgets.charge import Charge

    ledger, what = opened(tmp_path), Charge("example", both, "site", "a")
    limit = budget(unit="example")
    assert ledger.change(lambda accounts: needed(accounts, [limit], work(), what, 1.0))[1] == ""
    assert opened(tmp_path).read().account("mri-2026").kinds == {(1.1, 0.01): 100, (4.0, 1.0): 1}
