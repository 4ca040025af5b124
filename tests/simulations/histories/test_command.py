"""The command `atoll simulate --faults`: many seeds, one seed, and the report of a failure."""

import json

import pytest

from atoll.protocol.settings import ConfigError
from atoll.server.rounds.cohort_round import Round
from atoll.simulations.histories.command import judge_histories
from atoll.simulations.histories.soak import soak


@pytest.mark.slow
def test_good_histories_end_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge_histories(seeds=30, jobs=1) == 0
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
    assert judge_histories("network", seeds=3, first=0, jobs=1) == 1
    shown = capsys.readouterr()
    assert "seed=0: " in shown.err
    assert "replay: atoll simulate --faults network --seed 0" in shown.err
    assert "bad seeds: 0" in shown.out
    assert judge_histories("network", seed=0) == 1
    assert "WRONG: step" in capsys.readouterr().out


def test_a_replay_shows_everything_and_that_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge_histories("crashes", seed=3) == 0
    first = capsys.readouterr().out
    assert "coordinator  RunStarted" in first
    assert first.endswith("nothing is wrong\n")
    assert judge_histories("crashes", seed=3) == 0
    assert capsys.readouterr().out == first


def test_as_json_there_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge_histories("none", seeds=5, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bad"] == {}
    assert len(found["num_events"]) == 5
    assert judge_histories("crashes", seed=3, as_json=True) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["preset"], one["seed"], one["wrong"]) == ("crashes", 3, [])
    assert any("coordinator  RunStarted" in line for line in one["history"])


def test_what_cannot_be_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        judge_histories("storms", seeds=0, jobs=-1)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["--faults storms", "--seeds 0", "--jobs -1"]
