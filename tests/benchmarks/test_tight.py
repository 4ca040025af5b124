"""The loops by hand do their duties: what they write can be read back, and what they compute is right."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from atoll.aggregation.rules.order_statistics import by_sort
from benchmarks.tight_histories import histories
from benchmarks.tight_journal import TightJournal
from benchmarks.tight_million import TightMillion
from benchmarks.tight_sort import WAYS, TightSort

ENTRIES = [(1, 0.5, "RoundDue", "{}"), (2, 1.0, "UpdateReceived", '{"a":1}')]


def test_what_a_journal_by_hand_has_committed_another_process_finds(tmp_path):
    journal = TightJournal(tmp_path / "state.db")
    journal.commit(ENTRIES, updates=[("d", "meta", b"1234")], pages=[(2, 0, "{}")], record=(1, "{}"))
    found = TightJournal(tmp_path / "state.db")
    assert list(found.entries(after=0)) == ENTRIES
    assert list(found.entries(after=1)) == ENTRIES[1:]
    assert (list(found.pages()), found.updates(), found.num_records()) == ([(2, "{}")], [b"1234"], 1)
    journal.prune(1)
    assert list(found.entries(after=0)) == ENTRIES[1:]
    assert found.updates() == []


def test_a_journal_by_hand_notices_damage(tmp_path):
    journal = TightJournal(tmp_path / "state.db")
    journal.commit(ENTRIES)
    journal._database.execute("UPDATE journal SET body = '{\"a\":2}' WHERE seq = 2")
    with pytest.raises(AssertionError):
        list(journal.entries(after=0))


def test_a_run_by_hand_goes_on_where_another_process_stopped(tmp_path, capsys):
    one = TightMillion(tmp_path, 20, 2)
    one.join(range(1500), "first")
    one.run()
    other = TightMillion(tmp_path, 20, 4)
    other.recover()
    assert (other.members, other.version) == (one.members, 2)
    other.join(range(150), "again")
    other.run()
    assert other.version == 4
    assert sum("counted_round" in member for member in other.members.values()) >= 20
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"ended": "finished"')


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_order_by_hand_finds_the_middle(way, tmp_path):
    rows = np.random.default_rng(0).standard_normal((7, 1000), np.float32)
    paths = [tmp_path / str(number) for number in range(7)]
    for path, row in zip(paths, rows, strict=True):
        path.write_bytes(row.tobytes())
    wanted = np.empty(1000)
    by_sort(rows, 2, 5, wanted)
    with ThreadPoolExecutor(2) as pool:
        tight = TightSort(paths, 1000, 384, pool)
        np.testing.assert_allclose(tight(way, 100, 2, 5), wanted, rtol=1e-6)
        tight.close()


def test_a_file_that_ends_too_early_is_no_measurement(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(396))
    with ThreadPoolExecutor(1) as pool, pytest.raises(EOFError):
        TightSort([path], 100, 100, pool)(WAYS[0], 100, 0, 1)


@pytest.mark.real
@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_events_happen_by_hand_as_are_asked_for(jobs):
    assert histories(7, [(84, 138), (0, 3), (5, 0)] * 20, jobs) == 20 * (84 + 138 + 3 + 5)
