"""The command `python -m tests.histories`: many seeds, one seed, and the report of a failure."""

import pytest

from atoll.server.rounds.cohort_round import Round
from tests.histories.__main__ import main
from tests.histories.soak import soak


@pytest.mark.slow
def test_good_histories_end_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "30", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "30 histories, 0 bad" in out
    assert "refusals" in out
    assert "coordinator_crashes" in out


@pytest.mark.real
def test_any_number_of_processes_comes_to_the_same() -> None:
    alone, together = soak(0, 60, jobs=1), soak(0, 60, jobs=2)
    assert alone.document() == together.document()
    assert alone.num_histories == 60


def test_a_bad_history_ends_with_exit_code_1_its_seed_and_how_to_replay_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Round, "_settle", lambda self, now: ())  # a round waits for its deadline whatever happens
    assert main(["--faults", "network", "--seeds", "3", "--jobs", "1"]) == 1
    shown = capsys.readouterr()
    assert "seed=0: " in shown.err
    assert "replay: python -m tests.histories --faults network --seed 0" in shown.err
    assert "bad seeds: 0" in shown.out
    assert main(["--faults", "network", "--seed", "0"]) == 1
    assert "WRONG: Violation: architecture, invariant 4, round 1: it still collects" in capsys.readouterr().out


def test_a_replay_shows_everything_and_that_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "crashes", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert "coordinator  RunStarted" in first
    assert first.endswith("nothing is wrong\n")
    assert main(["--faults", "crashes", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
