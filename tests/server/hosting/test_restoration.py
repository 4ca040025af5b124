"""The newest published rounds of private runs after a restoration: what a start needs, and what it refuses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.vocabulary import RoundId, RunId, RunState
from atoll.server.errors import OperatorError, StoreCorrupted
from atoll.server.hosting.recovering import Replayed
from atoll.server.hosting.restoration import RESTORED, Restoration, published_of
from tests.server.rounds.test_cohort_round import Drive
from tests.server.rounds.test_privacy import closed, named, private, rules
from tests.server.rounds.test_private_sums import Private
from tests.server.rounds.test_shared_examples import privacy as shared

HERE = Restoration("r1", 1.7e9)


class Row:
    def __init__(self, run_id: str) -> None:
        self.run_id = RunId(run_id)


def replayed(run_id: str, drive: Any) -> Any:
    return Replayed(Row(run_id), drive.machine, 0, ())  # type: ignore[arg-type]


def with_rounds(number: int, uses: int = 9) -> Drive:
    drive = private(rules(uses=uses))
    for _ in range(number):
        closed(drive)
        drive.fold()
    return drive


def faults(runs: list[Any], named: dict[str, int], restoration: Restoration | None = HERE) -> list[str]:
    with pytest.raises(OperatorError) as caught:
        published_of(restoration, runs, named)
    return str(caught.value).splitlines()


def test_a_restored_private_run_needs_its_newest_published_round_in_one_sentence() -> None:
    runs = [replayed("a-1", with_rounds(2)), replayed("plain-1", Drive())]
    assert faults(runs, {}) == [
        "run a-1 is private, and this state was restored from a backup of 2023-11-14 22:13:20 UTC, which does not know "
        "the rounds that were published since, nor their charges: start the coordinator once with --published "
        "a-1=ROUND, the newest published round (2, if none was)"
    ]
    assert published_of(HERE, runs, {"": 5}) == published_of(HERE, runs, {"a-1": 5}) == {"a-1": 5}
    assert published_of(HERE, runs, {"": 2}) == {"a-1": 2}


def test_a_round_below_what_the_backup_knows_is_refused_and_so_is_an_impossible_one() -> None:
    runs = [replayed("a-1", with_rounds(3))]
    assert faults(runs, {"a-1": 2}) == [
        "--published a-1=2: the backup itself has a version of round 3; allowed: 3 to 1000000000"
    ]
    assert "no run has as many" in faults(runs, {"": 10**9 + 1})[0]


def test_all_faults_at_once_and_a_round_without_a_run_must_be_of_the_only_one() -> None:
    runs = [replayed("a-1", with_rounds(1)), replayed("b-1", with_rounds(1)), replayed("plain-1", Drive())]
    assert [line.split("run ")[1].split(" ")[0] for line in faults(runs, {})] == ["a-1", "b-1"]
    assert faults(runs, {"": 4, "plain-1": 4, "a-1": 0}) == [
        "--published: got 4 without a run; allowed: a-1=ROUND, b-1=ROUND",
        "--published: there is no private run 'plain-1': did you mean a-1? (known: a-1, b-1)",
        "--published a-1=0: the backup itself has a version of round 1; allowed: 1 to 1000000000",
    ]
    assert published_of(HERE, runs, {"a-1": 1, "b-1": 8}) == {"a-1": 1, "b-1": 8}


def test_an_answer_counts_once_and_another_restoration_asks_again() -> None:
    drive = with_rounds(1)
    named(drive, 4, "r1")
    runs = [replayed("a-1", drive)]
    assert published_of(HERE, runs, {}) == published_of(HERE, runs, {"a-1": 9}) == {}
    assert len(faults(runs, {}, Restoration("r2", 1.7e9))) == 1


def test_an_ended_run_may_rest_and_is_asked_when_it_resumes() -> None:
    drive = with_rounds(1, uses=1)
    assert drive.machine.ledger.state is RunState.FINISHED
    assert published_of(HERE, [replayed("a-1", drive)], {}) == {}
    assert "--published a-1=ROUND" in HERE.fault_of(RunId("a-1"), drive.machine)
    assert published_of(HERE, [replayed("a-1", drive)], {"a-1": 6}) == {"a-1": RoundId(6)}
    named(drive, 6, "r1")
    assert HERE.fault_of(RunId("a-1"), drive.machine) == ""


def test_where_the_clients_add_the_noise_the_newest_round_that_has_begun_is_asked_for() -> None:
    """An attempt that was opened and abandoned has told the coordinator a sum, and its charge is after the backup."""
    run = Private(4, random.Random(1), shared(), rounds=1)
    assert run.run()
    ledger = run.machine.ledger
    ledger.next_round = RoundId(ledger.next_round + 1)  # a later one that was abandoned
    runs = [replayed("a-1", run)]
    assert ledger.newest_published == 1
    assert "which does not know the rounds that have begun since, nor their charges" in HERE.fault_of(
        RunId("a-1"), run.machine
    )
    assert HERE.fault_of(RunId("a-1"), run.machine).endswith(
        "--published a-1=ROUND, the newest round that has begun, published or not (2, if none has)"
    )
    assert faults(runs, {"a-1": 1}) == ["--published a-1=1: the backup itself has round 2; allowed: 2 to 1000000000"]
    assert published_of(HERE, runs, {"a-1": 2}) == {"a-1": 2}


def test_a_state_that_was_never_restored_needs_and_takes_no_answer() -> None:
    runs = [replayed("a-1", with_rounds(1))]
    assert published_of(None, runs, {}) == {}
    [fault] = faults(runs, {"a-1": 3}, None)
    assert "was not restored from a backup" in fault


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"id": "x", "made_at": "yesterday"}', '{"made_at": 3}'])
def test_a_note_that_cannot_be_read_allows_nothing(tmp_path: Path, text: str) -> None:
    assert Restoration.of(tmp_path) is None
    (tmp_path / RESTORED).write_text(text)
    with pytest.raises(StoreCorrupted, match="restore the backup again"):
        Restoration.of(tmp_path)
    (tmp_path / RESTORED).write_text(json.dumps({"id": "x", "from": "b.tar", "made_at": 3.5}))
    assert Restoration.of(tmp_path) == Restoration("x", 3.5)
